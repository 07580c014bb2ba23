"""Quantized weights on the meta device: a format's own layers if they work there, else stand-ins.

Other programs' ways with formats of plain numbers have stand-ins, too (`schema/overheads.py`,
ProductPractice).

bitsandbytes need not be installed to plan, and works on no meta tensors. Its stand-ins store, keep
and compute what its Linear layers do (bitsandbytes/autograd/_functions.py, MatMul4Bit;
functional.py, quantize_4bit with nested statistics).
"""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from autotune.cost.kernels import DeviceRules
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.quantization import Quantization
from autotune.knobs.quantized_layers import as_stored
from autotune.knobs.sizes import NESTED_BLOCK, NF4_BLOCK
from autotune.models.family import Family
from autotune.plan.overheads import ProductPractice

FUSED_4_BIT_ROWS = 4
"""Up to so many rows, every CUDA card multiplies by the 4-bit weight as it is stored, if its
columns fill whole blocks (bitsandbytes/backends/cuda/ops.py, `_GEMM_4BIT_CUSTOM_FLOOR_M`);
above, that depends on card and shape. Micro-batches above 4 follow the line through 2 and 4."""

NF4_TABLE_BYTES = 16 * 4 + 256 * 4 + 4
"""Code table, nested code table and offset of every layer."""


def nf4_bytes(num_weights: int) -> int:
    """Bytes of one NF4 tensor with double quantization: 4 bits each, one byte per 64, one fp32
    per 64 x 256."""
    maxima = -(-num_weights // NF4_BLOCK)
    return -(-num_weights // 2) + maxima + 4 * -(-maxima // NESTED_BLOCK) + NF4_TABLE_BYTES


def quantize_for_tracing(
    family: Family,
    transformer: nn.Module,
    quantization: str,
    rules: DeviceRules,
    practice: ProductPractice | None = None,
) -> None:
    """Store weights as the knob does, as a stand-in of the same size and behavior, or as another
    program does."""
    weight_format = WEIGHT_FORMATS[quantization]
    if practice:
        stand_in = partial(_stand_in_for_practice, resolve_name(weight_format.quantize), practice)
    elif weight_format.stand_in:
        stand_in = partial(resolve_name(weight_format.stand_in), rules=rules)
    else:
        Quantization().apply(transformer, family, quantization)
        return
    stored = [transformer] if practice and practice.everywhere else family.blocks(transformer)
    for layer in [
        layer for module in stored for layer in module.modules() if isinstance(layer, nn.Linear)
    ]:
        stand_in(layer)


def stand_in_for_nf4(layer: nn.Linear, rules: DeviceRules) -> None:
    """Let a layer on the meta device take and do what bitsandbytes' `Linear4bit` would."""
    shape, dtype = layer.weight.shape, layer.weight.dtype
    stored = torch.empty(nf4_bytes(layer.weight.numel()), dtype=torch.uint8, device="meta")
    layer.weight = nn.Parameter(stored, requires_grad=False)
    multiply: Callable[..., torch.Tensor] = MatMul4Bit.apply
    # It computes in its own precision, and answers in the input's.
    _replace_forward(layer, lambda x: multiply(x.to(dtype), layer, shape, rules).to(x.dtype))


def _stand_in_for_practice(
    quantize: Callable[[nn.Linear], None], practice: ProductPractice, layer: nn.Linear
) -> None:
    """Let a layer multiply by what `quantize` stores of it as a program does."""
    dtype = layer.weight.dtype
    quantize(layer)
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "weights": _keeping_weight,
        "inputs": WithWeightGradient.apply,
    }
    multiply = ways[practice.keeps]
    _replace_forward(layer, lambda x: multiply(x, layer, dtype))


def _keeping_weight(x: torch.Tensor, layer: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """Autograd keeps the converted weight for the input's gradient."""
    scale: Any = layer.scale
    weight = as_stored(layer.weight).to(dtype) * scale.to(dtype)[:, None]
    # A model that casts to the precision of a weight may have made bytes of it.
    return nn.functional.linear(x if x.is_floating_point() else x.to(dtype), weight, layer.bias)


class WithWeightGradient(torch.autograd.Function):
    """A product with int8 weights that computes their gradient, too, and converts them for each
    pass (torchao/prototype/quantized_training/int8.py, _Int8WeightOnlyLinear)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, dtype: torch.dtype) -> Any:
        ctx.save_for_backward(x)
        ctx.layer = layer
        out = nn.functional.linear(x, layer.weight.to(dtype)) * layer.scale.to(dtype)
        return out if layer.bias is None else out + layer.bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x,), layer = gradients, ctx.saved_tensors, ctx.layer
        of_input = (gradient * layer.scale.to(gradient.dtype)).matmul(
            layer.weight.to(gradient.dtype)
        )
        flat = gradient.reshape(-1, len(layer.weight))
        unused = flat.t().matmul(x.to(gradient.dtype).reshape(-1, x.shape[-1]))
        del unused
        return of_input.to(x.dtype), None, None


def _replace_forward(layer: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer.forward = forward  # type: ignore[assignment,method-assign]


class MatMul4Bit(torch.autograd.Function):
    """Dequantizes the weight for each product, but for a few rows on CUDA; keeps only the stored
    weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear, shape: Any, rules: DeviceRules) -> Any:
        ctx.stored, ctx.shape = layer.weight, shape
        if (
            rules == "cuda"
            and x.numel() // shape[1] <= FUSED_4_BIT_ROWS
            and shape[1] % NF4_BLOCK == 0
        ):
            return layer.weight.new_empty(
                (*x.shape[:-1], shape[0]), dtype=x.dtype
            )  # reads what is stored
        return nn.functional.linear(x, _from_4_bits(layer.weight, shape, x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return (
            gradient.matmul(_from_4_bits(ctx.stored, ctx.shape, gradient.dtype)),
            None,
            None,
            None,
        )


def _from_4_bits(stored: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A full-precision copy: one kernel that reads what is stored, after one for the blocks'
    absolute maxima."""
    maxima = stored[: -(-shape[0] * shape[1] // NF4_BLOCK)]
    maxima = maxima.new_empty(maxima.shape, dtype=torch.float32) + 1.0
    return stored.new_empty(shape, dtype=dtype)
