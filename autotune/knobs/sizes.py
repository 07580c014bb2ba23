"""Sizes that decide how many bytes quantized weights take, and how many while they are
quantized. Needs no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NF4_BLOCK = 64
"""Weights per absolute maximum."""
NESTED_BLOCK = 256
"""Absolute maxima per fp32 scale of theirs, with double quantization."""

SLICE_BYTES = 32 << 20
CPU_SLICE_BYTES = 1 << 20
"""Bytes of a weight to quantize at a time: the smaller stays in a CPU's caches; on a GPU it
would be launches, and loading has memory to spare, since training needs far more."""


def slice_bytes_of(weight: "Tensor") -> int:
    """Bytes of `weight` to quantize at a time."""
    return CPU_SLICE_BYTES if weight.is_cpu else SLICE_BYTES
