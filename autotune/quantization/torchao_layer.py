"""torchao's quantized weights, made in slices, in layers that keep nothing else for their backward pass.

torchao takes many times what it is given for a moment: of a slice, then, instead of the whole weight. A row has its own
scale, so the bits are those of the whole.
"""

from typing import Any

import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from autotune.quantization.frozen_linear import FrozenLinear
from autotune.quantization.sizes import slice_bytes_of


def quantize_int8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as int8 with a scale per row."""
    _quantize(layer, Int8WeightOnlyConfig())


def quantize_float8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as float8 (e4m3) with a scale per row."""
    _quantize(layer, Float8WeightOnlyConfig())


def _quantize(layer: nn.Linear, config: Any) -> None:
    layer.weight = quantize_in_slices(layer.weight.data, config, slice_bytes_of(layer.weight))
    layer.__class__ = FrozenLinear


def quantize_in_slices(weight: torch.Tensor, config: Any, slice_bytes: int) -> nn.Parameter:
    """torchao's quantized form of `weight`, from some rows at a time."""
    num_rows, num_columns = weight.shape
    step = max(1, slice_bytes // max(1, num_columns * weight.element_size()))
    if weight.is_meta:  # nothing is held; a trace needs the shapes alone
        step = num_rows
    whole: dict[str, torch.Tensor] = {}
    for start in range(0, num_rows, step):
        kind, parts, context = _quantize_rows(weight[start : start + step], config)
        for name, part in parts.items():
            if name not in whole:
                whole[name] = part.new_empty((num_rows, *part.shape[1:]))
            whole[name][start : start + len(part)] = part
        del parts, part  # or they would stay while the next slice is quantized
    return nn.Parameter(kind.__tensor_unflatten__(whole, context, weight.shape, weight.stride()), requires_grad=False)


def _quantize_rows(rows: torch.Tensor, config: Any) -> "tuple[Any, dict[str, torch.Tensor], Any]":
    """torchao's tensor class for `rows` of a weight, the plain tensors inside, and what else the class needs."""
    layer = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    quantize_(layer, config)
    # Taken out of the layer: torchao binds a method to it, a cycle that lives until the collector comes by.
    quantized: Any = layer._parameters.pop("weight")
    names, context = quantized.__tensor_flatten__()
    parts = {name: getattr(quantized, name) for name in names}
    if not rows.is_meta and parts["qdata"].dtype == torch.float8_e4m3fn:
        # torchao scales a row by its largest value, so rows of zeros became 0 / 0. Rows with NaN keep their own scale.
        is_empty = parts["scale"] == 0
        parts["scale"].masked_fill_(is_empty, 1)
        parts["qdata"].view(torch.uint8).masked_fill_(is_empty, 0)  # the bits of zero
    return type(quantized), parts, context
