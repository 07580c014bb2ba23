"""Host memory of exact size, page-locked for CUDA, so that copies to and from a device run beside
its work.

PyTorch's own pinned memory rounds each request up to a power of two
(aten/src/ATen/core/CachingHostAllocator.h), which wastes a third of it on average. Here memory is
taken as it is and registered with CUDA's runtime.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError
from autotune.runtime import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

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
