"""A frozen Linear on quantized weights that keeps nothing but those weights for its backward pass.

The weights are torchao's, or plain float8 that each product casts to its own dtype: what diffusers calls layerwise
casting, without hooks that hold a cast copy from the forward to the backward pass. torchao's own layers leave the
dequantized copy of each product to autograd, so without checkpointing an int8 model needs more memory than a bf16 one.
Here the backward pass dequantizes again: one more read of the stored weights, and bit for bit the same gradient of the
input. The weights themselves get none: they are frozen.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn


class FrozenProduct(torch.autograd.Function):
    """`linear(x, weight, bias)` for a weight of torchao's Int8Tensor or Float8Tensor, with one scale per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight.qdata, weight.scale)
        if x.dtype == torch.float16:  # products with stored integers overflow before torchao scales them
            return functional.linear(x, _scaled(weight.qdata, weight.scale, x.dtype), bias)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        if stored.dtype == torch.int8 and gradient.dtype != torch.float16:
            # As torchao does: it multiplies by the stored integers and scales the outcome.
            weight = stored.to(gradient.dtype)
            gradient = gradient * scale.to(gradient.dtype).flatten()
        else:
            weight = _scaled(stored, scale, gradient.dtype)
        return gradient.matmul(weight), None, None


def _scaled(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.to(torch.float32).mul_(scale.reshape(-1, 1)).to(dtype)


class CastProduct(torch.autograd.Function):
    """`linear(x, weight, bias)` for the bytes of a float8 weight, cast to the dtype of `x` in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored)
        return functional.linear(x, stored.view(FLOAT8).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (stored,) = ctx.saved_tensors
        return gradient.matmul(stored.view(FLOAT8).to(gradient.dtype)), None, None


class FrozenLinear(nn.Linear):
    """A Linear whose weight is quantized. Made of a layer in place, by its class: to all others it stays a Linear."""

    def forward(self, input: Tensor) -> Tensor:
        function = CastProduct if self.weight.dtype == torch.uint8 else FrozenProduct
        product: Tensor = function.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


def quantize_layerwise(layer: nn.Linear) -> None:
    """Cast the weight of `layer` to float8 (e4m3) as it is, without scales; what is beyond 448 is lost.

    Kept as bytes: peft would round the adapter of a layer whose weight has a floating dtype to that dtype.
    """
    layer.weight = nn.Parameter(layer.weight.data.to(FLOAT8).view(torch.uint8), requires_grad=False)
    layer.__class__ = FrozenLinear
