"""Frozen Linear layers that multiply in 8 bits: both factors, in both passes, from one stored
weight.

A weight is stored as int8 or float8 (e4m3) with one scale per row. Activations get a scale per row
on the fly, and so does the incoming gradient once the weight's scales are folded into it. So with W
= s * Q, x = a * X and g * s = b * G, an output is a * (X @ Q.T) * s and the gradient of an input b
* (G @ Q): the same Q serves both. Frozen weights get no gradient, so nothing else is kept. All
tensors are plain, and torch.compile traces what happens here.

What surrounds a product is about as many bytes as a GPU moves in the product's time, so there it is
compiled, with shapes left open. Layers whose sides are no multiples of 16, which kernels on CUDA
ask for, stay as they are.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.quantization.stored_rows import (
    FLOAT8,
    as_stored,
    quantize_rows,
    row_scales,
    store_rows,
)

SIDE_MULTIPLE, MIN_ROWS = 16, 32
"""What torch's products on CUDA ask for: `_int_mm` sides that 8 divides and more than 16 rows
(some cards refuse fewer than 32), `_scaled_mm` sides that 16 divides."""


def quantize_folded(gradient: Tensor, columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `gradient` (rows, columns) times fp32 `columns`."""
    folded = gradient * columns
    scale = row_scales(folded, dtype)
    folded.div_(scale)
    return (folded.round_() if dtype == torch.int8 else folded).to(dtype), scale


def unscale(
    sums: Tensor, rows: Tensor, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`sums * rows * columns + bias` in `dtype`: sums int32 (m, n), rows (m, 1), columns and
    bias (n,).
    """
    out = sums.float().mul_(rows)
    out = out if columns is None else out.mul_(columns)
    return (out if bias is None else out.add_(bias)).to(dtype)


class Kernels(NamedTuple):
    """What runs around products, and whether these have to meet what CUDA's kernels ask for."""

    quantize_rows: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    quantize_folded: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    unscale: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]
    has_cuda_limits: bool


PLAIN = Kernels(quantize_rows, quantize_folded, unscale, False)
PRODUCT_KERNELS = {"cpu": PLAIN, "meta": PLAIN, "cuda": PLAIN._replace(has_cuda_limits=True)}
"""By kind of device."""


@cache
def _compiled() -> Kernels:
    """When they are needed: torch's compiler takes seconds to import."""
    quantize, fold, scale = (torch.compile(function, dynamic=True) for function in PLAIN[:3])
    return Kernels(quantize, fold, scale, True)  # type: ignore[arg-type]


def kernels_for(tensor: Tensor) -> Kernels:
    """The kernels that run on the tensor's device."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        return _compiled()
    return PRODUCT_KERNELS[tensor.device.type]


def multiply(
    left: Tensor,
    rows: Tensor,
    right: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`(rows * left) @ (right * columns) + bias` in `dtype`: the one place that calls the products'
    kernels.

    Args:
        left: 8 bits, (m, k).
        rows: fp32 (m, 1).
        right: 8 bits, (k, n).
        columns: fp32 (n,); None for ones.
        bias: (n,), or None.
        dtype: of the result.
    """
    kernels, num_rows = kernels_for(left), len(left)
    missing = MIN_ROWS - num_rows if kernels.has_cuda_limits else 0
    if missing > 0:
        left, rows = (
            functional.pad(left, (0, 0, 0, missing)),
            functional.pad(rows, (0, 0, 0, missing)),
        )
    if right.stride(0) != 1 and (kernels.has_cuda_limits or right.dtype == FLOAT8):
        right = right.t().contiguous().t()  # kernels read the second factor by columns alone
    left = left.contiguous()  # what is rounded keeps the order in memory of what it was made of
    if left.dtype == torch.int8:
        out = kernels.unscale(torch._int_mm(left, right), rows, columns, bias, dtype)
    else:
        columns = rows.new_ones(right.shape[1]) if columns is None else columns
        made = (
            torch.bfloat16 if kernels.has_cuda_limits else dtype
        )  # all that kernels with scales per row write there
        out = torch._scaled_mm(
            left, right, scale_a=rows, scale_b=columns.unsqueeze(0), out_dtype=made
        ).to(dtype)
        out = out if bias is None else out.add_(bias)
    return out[:num_rows] if missing > 0 else out


class EightBitProduct(torch.autograd.Function):
    """`linear(x, scale * stored, bias)`. Shapes: x (rows, inputs), stored (outputs, inputs),
    scale (outputs,), in fp32; bytes of float8 come as uint8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale)
        weight = as_stored(stored)
        left, rows = kernels_for(x).quantize_rows(x, weight.dtype)
        return multiply(left, rows, weight.t(), scale, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        weight = as_stored(stored)
        left, rows = kernels_for(gradient).quantize_folded(gradient, scale, weight.dtype)
        return multiply(left, rows, weight, None, None, gradient.dtype), None, None, None


class EightBitLinear(nn.Linear):
    """Made of a layer in place, by its class: to all others it stays a Linear."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        # For parameters torch's compiler would make code for each size.
        scale, bias = self.scale.detach(), None if self.bias is None else self.bias.detach()
        out: Tensor = EightBitProduct.apply(rows, self.weight, scale, bias)  # type: ignore[no-untyped-call]
        return out if input.ndim == 2 else out.view(*input.shape[:-1], out.shape[-1])


def quantize_int8(layer: nn.Linear) -> None:
    """Let `layer` multiply in int8."""
    _quantize(layer, torch.int8)


def quantize_float8(layer: nn.Linear) -> None:
    """Let `layer` multiply in float8, e4m3."""
    _quantize(layer, FLOAT8)


def _quantize(layer: nn.Linear, dtype: torch.dtype) -> None:
    if not any(side % SIDE_MULTIPLE for side in layer.weight.shape):
        store_rows(layer, dtype)
        layer.__class__ = EightBitLinear
