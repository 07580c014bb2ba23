"""Gradient checkpointing of the first k blocks: memory for time, in steps instead of all or nothing."""

from typing import TYPE_CHECKING, Any

from autotune.families import Family, find_dropout_layers
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Choice, Workload

if TYPE_CHECKING:
    from torch import nn


LEVELS = 15
"""Steps between no and all but one block: a step of a 60-block model moves its peak by a few percent."""


class Checkpointing(Knob):
    """k of n blocks; never the last one, whose activations are needed at once anyway."""

    name = "checkpointed_blocks"
    title = "checkpointing"

    def choices(self, context: TuningContext) -> Choices:
        blocks = context.workload.model.num_blocks
        most = blocks - 1
        steps = sorted({round(most * step / LEVELS) for step in range(LEVELS + 1)}, reverse=True)
        dominated = (
            f"checkpointing all {blocks} blocks needs more memory and time than {most}: the last block's activations "
            "are used at once"
        )
        return Choices(tuple(steps), rejected={blocks: dominated})

    def shown(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks"

    def parity(self, choice: Choice) -> Parity | None:
        return Parity(1, 1e-5, "the same operations on the same values, run twice") if choice else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        from torch.utils.checkpoint import checkpoint

        draws = bool(find_dropout_layers(transformer))  # without, the random state need not be kept for every block
        chosen = {id(block) for block in family.blocks(transformer)[: int(choice)]}

        def run(block: Any, *inputs: Any) -> Any:
            if id(block) not in chosen:
                return block(*inputs)
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)

        if chosen:
            transformer.enable_gradient_checkpointing(run)  # type: ignore[operator]
        else:
            transformer.disable_gradient_checkpointing()  # type: ignore[operator]
