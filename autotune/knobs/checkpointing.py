"""Gradient checkpointing of the first blocks: memory for time, in steps instead of all or nothing.

Two knobs: how many blocks recompute everything, and how many after them recompute all but
attention. The cost model finds the numbers that go together (`search/mixtures.py`).
"""

from typing import TYPE_CHECKING, Any

from autotune.knobs.attention_backends import ATTENTION_BACKENDS
from autotune.knobs.knob import Choices, Knob, Parity, TuningContext
from autotune.models.adapter import find_dropout_layers
from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.workload import Workload

if TYPE_CHECKING:
    from torch import nn


class _RecomputationKnob(Knob):
    is_composed = True

    def parity(self, choice: Choice) -> Parity | None:
        return (
            Parity(1, 1e-5, "the same operations on the same values, run twice") if choice else None
        )

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        apply_recomputation(transformer, family, **{self.name: int(choice)})


class Checkpointing(_RecomputationKnob):
    """k of n blocks; never the last one, whose activations are needed at once anyway."""

    name = "checkpointed_blocks"
    title = "checkpointing"

    def choices(self, context: TuningContext) -> Choices:
        num_blocks = context.workload.model.num_blocks
        dominated = (
            f"checkpointing all {num_blocks} blocks needs more memory and time than "
            f"{num_blocks - 1}: the last block's "
            "activations are used at once"
        )
        return Choices(tuple(range(num_blocks - 1, -1, -1)), rejected={num_blocks: dominated})

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks"


class Selective(_RecomputationKnob):
    """Blocks that recompute all but attention, after those that recompute everything."""

    name = "selective_blocks"
    title = "keep attention"

    def choices(self, context: TuningContext) -> Choices:
        return Choices(tuple(range(context.workload.model.num_blocks)))

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if not candidate.selective_blocks:
            return None
        if candidate.recomputed_blocks > context.workload.model.num_blocks:
            return f"{candidate.recomputed_blocks} recomputing blocks are more than the model has"
        backend = ATTENTION_BACKENDS.get(candidate.attention)
        if backend is not None and (
            backend.needs.library or backend.function or backend.kernel == "math"
        ):
            computed = f"what {candidate.attention} computes"
            return f"{computed} cannot be kept by itself: it is not one of torch's fused operations"
        return "compiled blocks hide their attention" if candidate.compile != "off" else None

    def describe(self, choice: Choice, workload: Workload) -> str:
        return (
            f"{choice} of {workload.model.num_blocks} blocks recompute all but attention"
            if choice
            else "in none"
        )


ATTRIBUTE = "_recomputation"
"""Where a transformer remembers the settings that were applied, as numbers of blocks by knob."""


def apply_recomputation(transformer: "nn.Module", family: Family, **numbers: int) -> None:
    """Change `checkpointed_blocks`, `selective_blocks` or both; the other stays."""
    from torch.utils.checkpoint import checkpoint

    from autotune.knobs.kept_attention import keep_attention

    numbers = {**getattr(transformer, ATTRIBUTE, {}), **numbers}
    setattr(transformer, ATTRIBUTE, numbers)
    whole, selective = numbers.get("checkpointed_blocks", 0), numbers.get("selective_blocks", 0)
    if not whole + selective:
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    has_dropout = bool(
        find_dropout_layers(transformer)
    )  # without, no block need save the random state
    position = {
        id(block): at for at, block in enumerate(family.blocks(transformer)[: whole + selective])
    }

    def run(block: Any, *inputs: Any) -> Any:
        at = position.get(id(block))
        if at is None:
            return block(*inputs)
        compiled = block._compiled_call_impl
        if compiled is not None and at < whole:
            return compiled.recomputing(*inputs)
        keeping: dict[str, Any] = {} if at < whole else {"context_fn": keep_attention}
        return checkpoint(
            block, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, **keeping
        )

    transformer.enable_gradient_checkpointing(run)  # type: ignore[operator]
