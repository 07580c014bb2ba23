"""Swap whole blocks: the frozen weights of the first k wait on the host and visit the device when a pass needs them."""

import math
from typing import TYPE_CHECKING

from autotune.backends import WEIGHT_FORMATS
from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.knobs.quantization import Quantization
from autotune.schema import Candidate, Choice, Workload

if TYPE_CHECKING:
    from torch import nn

QUARTERS = 4
"""Levels between no and all but one block."""
PROVEN_BLOCKS = 2
"""The fewest of which one is fetched while another runs."""
HOST_SHARE = 0.7
"""Of the host's memory that swapped weights may take. Pinned they take more, which planning asks the cost model."""
FIXED_LIBRARY = "bitsandbytes"
"""Its weights cannot be swapped."""


class Swapping(Knob):
    """None, unless it is asked for or nothing is predicted to fit without."""

    name = "swapped_blocks"
    title = "swapped blocks"
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        most = context.workload.model.num_blocks - 1
        levels = sorted({math.ceil(most * step / QUARTERS) for step in range(1, QUARTERS + 1)} - {0}, reverse=True)
        device, host = context.hardware.device, context.hardware.host
        if device.kind != "cuda" or device.memory_kind == "integrated":
            reason = "device and host share one memory: swapping frees nothing"
            return Choices((0,), rejected=dict.fromkeys(levels, reason))
        storages = [WEIGHT_FORMATS[str(name)] for name in Quantization().choices(context).admitted]
        least = min(each.bytes_per_parameter for each in storages if each.library != FIXED_LIBRARY)
        weights = least * context.workload.model.num_parameters
        fitting = [k for k in levels if weights * k / (most + 1) <= HOST_SHARE * host.memory_bytes]
        too_many, against = [k for k in levels if k not in fitting], "the host has too little memory for the weights"
        reason = "each block crosses the bus twice a micro-batch: tried only where nothing fits without"
        return Choices((0,), rejected=dict.fromkeys(too_many, against), on_request=dict.fromkeys(fitting, reason))

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.swapped_blocks > candidate.checkpointed_blocks:
            recompute = f"swapped blocks have to recompute, and {candidate.checkpointed_blocks} do"
            return f"{recompute}: autograd would keep their weights on the device"
        if candidate.swapped_blocks and WEIGHT_FORMATS[candidate.quantization].library == FIXED_LIBRARY:
            return "bitsandbytes keeps what belongs to its weights on the GPU"
        if candidate.swapped_blocks and candidate.compile != "off":
            return "compiled blocks hold on to their weights"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        if not choice:
            return None
        because = "the same operations on copies of the same weights"
        return Parity(PROVEN_BLOCKS, 1e-5, because, needs=(("checkpointed_blocks", PROVEN_BLOCKS),))

    def shown(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} of {workload.model.num_blocks} blocks" if choice else "none"

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        """Once per loaded model; the device is where weights of other blocks lie."""
        from autotune.knobs.block_swap import BlockSwap

        blocks = family.blocks(transformer)[: int(choice)]
        if blocks:
            on_cuda = (parameter.device for parameter in transformer.parameters() if parameter.is_cuda)
            BlockSwap(blocks, next(on_cuda, next(transformer.parameters()).device))
