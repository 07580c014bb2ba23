"""Gradient checkpointing of the first k blocks: memory for time, in steps instead of all or nothing."""

from typing import TYPE_CHECKING, Any

from autotune.families import Family, find_dropout_layers
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Choice, Workload

if TYPE_CHECKING:
    from torch import nn

NUM_STEPS = 15
"""Steps between no and all but one block: a step of a 60-block model moves its peak by a few percent."""


class Checkpointing(Knob):
    """k of n blocks; never the last one, whose activations are needed at once anyway."""

    name = "checkpointed_blocks"
    title = "checkpointing"

    def choices(self, context: TuningContext) -> Choices:
        num_blocks = context.workload.model.num_blocks
        max_useful = num_blocks - 1
        levels = sorted({round(max_useful * step / NUM_STEPS) for step in range(NUM_STEPS + 1)}, reverse=True)
        dominated = (
            f"checkpointing all {num_blocks} blocks needs more memory and time than {max_useful}: the last block's "
            "activations are used at once"
        )
        return Choices(tuple(levels), rejected={num_blocks: dominated})

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks"

    def parity(self, choice: Choice) -> Parity | None:
        return Parity(1, 1e-5, "the same operations on the same values, run twice") if choice else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        from torch.utils.checkpoint import checkpoint

        has_dropout = bool(find_dropout_layers(transformer))  # without, no block need save the random state
        chosen = {id(block) for block in family.blocks(transformer)[: int(choice)]}

        def run(block: Any, *inputs: Any) -> Any:
            if id(block) not in chosen:
                return block(*inputs)
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=has_dropout)

        if chosen:
            transformer.enable_gradient_checkpointing(run)  # type: ignore[operator]
        else:
            transformer.disable_gradient_checkpointing()  # type: ignore[operator]
