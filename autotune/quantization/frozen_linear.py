"""A frozen Linear on weights of 8 bits that keeps nothing but those weights for its backward pass.

Weights are plain int8 or float8 with one scale per row. Left to autograd, the copy of each product would be kept, too, and without checkpointing an int8
model would need more memory than a bf16 one. Here the backward pass casts again: one more read of
the stored weights. The weights themselves get no gradient: they are frozen.

A scale is applied where that moves fewest bytes. CUDA's kernels convert operands as they read them,
so there int8 is cast and scaled at once: 3 bytes a weight in bf16. torch multiplies no float8 by
element, and a CPU converts beforehand, so there a weight is only cast, and the product's output is
scaled, together with its bias, or the gradient that comes in.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.quantization.stored_rows import FLOAT8, as_stored, store_rows

CONVERTS_AS_IT_READS = {"cpu": False, "cuda": True, "meta": False}
"""By kind of device, whether a kernel takes operands of several dtypes without copies of them."""


class FrozenProduct(torch.autograd.Function):
    """`linear(x, scale * stored, bias)`. Shapes: x (..., inputs), stored (outputs, inputs),
    scale (outputs,), in fp32; bytes of float8 come as uint8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale)
        if _scales_weight(stored, x):
            return functional.linear(x, _weight(stored, scale, x.dtype), bias)
        out = functional.linear(x, _weight(stored, None, x.dtype))
        scale = scale.to(out.dtype)
        return out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale, out=out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        if not _scales_weight(stored, gradient):
            gradient, scale = gradient * scale.to(gradient.dtype), None
        return gradient.matmul(_weight(stored, scale, gradient.dtype)), None, None, None


def _scales_weight(stored: Tensor, factor: Tensor) -> bool:
    """Whether the weight is scaled, not what it is multiplied with. In fp16 products with
    unscaled numbers overflow.
    """
    is_one_kernel = stored.dtype == torch.int8 and CONVERTS_AS_IT_READS[stored.device.type]
    return is_one_kernel or factor.dtype == torch.float16


def _weight(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that is stored in `dtype`, rounded once."""
    if scale is None:
        return as_stored(stored).to(dtype)
    if stored.dtype == torch.int8:
        return torch.mul(
            stored,
            scale.unsqueeze(1),
            out=torch.empty(stored.shape, dtype=dtype, device=stored.device),
        )
    return as_stored(stored).to(dtype).mul_(scale.unsqueeze(1))


class FrozenLinear(nn.Linear):
    """A Linear whose weight is quantized. Made of a layer in place, by its class: to all others
    it stays a Linear.
    """

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = FrozenProduct.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-untyped-call]
        return product


def quantize_int8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as int8 with a scale per row."""
    store_rows(layer, torch.int8, torch.bfloat16)
    layer.__class__ = FrozenLinear


def quantize_float8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as float8 (e4m3) with a scale per row."""
    store_rows(layer, FLOAT8, torch.bfloat16)
    layer.__class__ = FrozenLinear
