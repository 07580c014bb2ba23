"""Weights in 8 bits with one scale per row, in plain tensors.

A row's largest number becomes the largest of int8 or float8 (e4m3). float8 is kept as bytes: peft
would round the adapter of a layer whose weight has a floating dtype to that dtype.
"""

import torch
from torch import Tensor, nn

from autotune.quantization.sizes import slice_bytes_of

FLOAT8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}
"""Of each dtype."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros, and of rows whose scale would underflow."""


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` (rows, columns) in `dtype`, and the scale of each row, in fp32 (rows, 1)."""
    scale = row_scales(x, dtype)
    return _in_scale(x, scale, dtype), scale


def row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row of `x` in `dtype`, in fp32 (rows, 1)."""
    largest = torch.maximum(
        x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_()
    )  # abs() would take a copy
    return largest.float().div_(LARGEST[dtype]).clamp_(min=SMALLEST_SCALE)


def _in_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = x / scale
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def store_rows(
    layer: nn.Linear, dtype: torch.dtype, scales_as: torch.dtype = torch.float32
) -> None:
    """Store the weight of `layer` in `dtype`, and its scales (outputs,) in fp32 beside it, as
    `scale`.

    Scales are numbers that `scales_as` has: what is scaled in that dtype then rounds no scale.
    """
    weight = layer.weight.data
    stored, scale = (
        weight.new_empty(weight.shape, dtype=dtype),
        weight.new_empty(len(weight), dtype=torch.float32),
    )
    step = max(1, slice_bytes_of(weight) // (weight.shape[1] * weight.element_size()))
    for start in range(
        0, 0 if weight.is_meta else len(weight), step
    ):  # in slices: a whole takes several times itself
        rows = slice(start, start + step)
        scales = row_scales(weight[rows], dtype).to(scales_as).float()
        stored[rows], scale[rows] = _in_scale(weight[rows], scales, dtype), scales.flatten()
    stored = stored.view(torch.uint8) if dtype == FLOAT8 else stored
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))


def as_stored(weight: Tensor) -> Tensor:
    """A stored weight as int8 or float8."""
    return weight.view(FLOAT8) if weight.dtype == torch.uint8 else weight
