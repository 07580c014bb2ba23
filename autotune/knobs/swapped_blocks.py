"""Block swap: the frozen weights of the first k blocks wait on the host, and visit the device for each pass."""

import math
from typing import TYPE_CHECKING

from autotune.backends import WEIGHT_FORMATS
from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.knobs.quantization import Quantization
from autotune.schema import Candidate, Choice, Workload

if TYPE_CHECKING:
    from torch import nn

NUM_LEVELS = 4
"""Levels between no and all but one block."""
CHECKED_BLOCKS = 2
"""The fewest of which one is fetched while another runs."""
HOST_SHARE = 0.7
"""Share of the host's memory that swapped weights may take. Pinned they take more, for which planning asks the cost
model."""


class Swapping(Knob):
    """None, unless it is asked for or nothing is predicted to fit without."""

    name = "swapped_blocks"
    title = "block swap"
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        model, host = context.workload.model, context.hardware.host
        max_swapped = model.num_blocks - 1
        steps = range(NUM_LEVELS, 0, -1)
        levels = [k for k in dict.fromkeys(math.ceil(max_swapped * step / NUM_LEVELS) for step in steps) if k]
        if context.hardware.device.kind != "cuda" or context.hardware.device.memory_kind == "integrated":
            reason = "device and host share one memory: swapping frees nothing"
            return Choices((0,), rejected=dict.fromkeys(levels, reason))
        formats = (WEIGHT_FORMATS[str(name)] for name in Quantization().choices(context).admitted)
        min_bytes = min(each.bytes_per_parameter for each in formats if each.can_offload)
        block_bytes = min_bytes * model.num_parameters / model.num_blocks
        fitting = [k for k in levels if k * block_bytes <= HOST_SHARE * host.memory_bytes]
        too_many: dict[Choice, str] = {
            k: "the host has too little memory for the weights" for k in levels if k not in fitting
        }
        reason = "each block crosses the bus twice a micro-batch: tried only if nothing fits without"
        return Choices((0,), rejected=too_many, on_request=dict.fromkeys(fitting, reason))

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.swapped_blocks > candidate.checkpointed_blocks:
            recompute = f"swapped blocks have to recompute, and {candidate.checkpointed_blocks} do"
            return f"{recompute}: autograd would keep their weights on the device"
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
        return Parity(CHECKED_BLOCKS, 1e-5, reason, other_choices={"checkpointed_blocks": CHECKED_BLOCKS})

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks" if choice else "no block swap"

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        """Once per loaded model; the device is where weights of other blocks lie."""
        from autotune.knobs.block_swap import BlockSwap

        blocks = family.blocks(transformer)[: int(choice)]
        if blocks:
            on_cuda = (parameter.device for parameter in transformer.parameters() if parameter.is_cuda)
            BlockSwap(blocks, next(on_cuda, next(transformer.parameters()).device))
