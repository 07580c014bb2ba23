"""Block swap: the frozen weights of the first k blocks wait on the host, and visit the device
for each pass.
"""

from typing import TYPE_CHECKING

from autotune.backends import WEIGHT_FORMATS
from autotune.families import Family
from autotune.knobs.base import WHOLE_WEIGHTS, Choices, Knob, Parity, TuningContext
from autotune.schema import Candidate, Choice, Workload

if TYPE_CHECKING:
    from torch import nn

CHECKED_BLOCKS = 2
"""The fewest of which one is fetched while another runs."""


class Swapping(Knob):
    """None to all but one block: what is swapped has to recompute.

    Whether they pay, and whether the host has room for them, the cost model tells.
    """

    name = "swapped_blocks"
    title = "block swap"
    is_composed = True
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        device = context.hardware.device
        numbers = range(context.workload.model.num_blocks - 1, -1, -1)
        refusal = WHOLE_WEIGHTS if context.workload.adapter == "dora" else None
        if device.kind != "cuda" or device.memory_kind == "integrated":
            refusal = "device and host share one memory: swapping frees nothing"
        if refusal:
            return Choices((0,), dict.fromkeys(numbers[:-1], refusal))
        return Choices(tuple(numbers))

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.swapped_blocks > candidate.recomputed_blocks:
            return (
                "block swap needs blocks that recompute: autograd would keep their weights on "
                "the "
                "device"
            )
        weight_format = WEIGHT_FORMATS.get(candidate.quantization)
        if candidate.swapped_blocks and weight_format is not None and not weight_format.can_offload:
            return f"{weight_format.name} keeps what belongs to its weights on the GPU"
        if candidate.swapped_blocks and candidate.compile != "off":
            return "compiled blocks hold on to their weights"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        if not choice:
            return None
        reason = "the same operations on copies of the same weights"
        return Parity(
            CHECKED_BLOCKS, 1e-5, reason, other_choices={"checkpointed_blocks": CHECKED_BLOCKS}
        )

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks" if choice else "no block swap"

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        """Once per loaded model; the device is where weights of other blocks lie."""
        from autotune.knobs.block_swap import BlockSwap

        blocks = family.blocks(transformer)[: int(choice)]
        if blocks:
            on_cuda = (
                parameter.device for parameter in transformer.parameters() if parameter.is_cuda
            )
            BlockSwap(blocks, next(on_cuda, next(transformer.parameters()).device))
