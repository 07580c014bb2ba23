"""Block swap: the frozen weights of the first k blocks wait on the host, and visit the device
for each pass.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.backends import WEIGHT_FORMATS
from autotune.errors import AutotuneError
from autotune.families import Family
from autotune.knobs.knob import WHOLE_WEIGHTS, Choices, Knob, Parity, TuningContext
from autotune.runtime import lazy_module
from autotune.schema import Candidate, Choice, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")

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


PAGE_BYTES = 4096
REGION_ALIGNMENT_BYTES = 256
"""Where a tensor may begin within its block's region: as well aligned as CUDA's allocator would
place it.
"""


def region_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these bytes begin in the region of one block, and the region's bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    return offsets, end


class HostRegion:
    """`bytes`, a tensor of uint8 that begins at a page, lives as long as anything refers to it;
    locked for CUDA.

    Raises:
        AutotuneError: the system does not let so much memory be locked.
    """

    def __init__(self, num_bytes: int, *, is_locked: bool) -> None:
        self.num_bytes = num_bytes
        pages = -(-num_bytes // PAGE_BYTES)
        whole = torch.empty(
            (pages + 1) * PAGE_BYTES, dtype=torch.uint8
        )  # no page is shared with another region
        start = -whole.data_ptr() % PAGE_BYTES
        self.bytes = whole[start : start + num_bytes]
        if is_locked:
            _lock(self.bytes, pages * PAGE_BYTES)
            weakref.finalize(
                self, _unlock, self.bytes
            ).atexit = False  # the driver does so when the process ends


def _lock(memory: "Tensor", num_bytes: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if code:
        raise AutotuneError(
            f"{num_bytes / 2**20:.0f} MiB of the host's memory could not be locked for the GPU "
            f"(CUDA error {code})",
            hint="raise the limit of locked memory (ulimit -l unlimited), or plan with --pin "
            "swapped_blocks=0",
        )


def _unlock(memory: "Tensor") -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
