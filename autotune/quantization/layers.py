"""Quantizes the Linear layers inside a model's blocks as their weights arrive, one at a time and in slices."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autotune.backends import LAYERWISE, WEIGHT_FORMATS
from autotune.quantization.frozen_linear import as_float8, freeze
from autotune.quantization.sizes import CPU_SLICE_BYTES, SLICE_BYTES
from autotune.weights import Transform


def quantize_inside(blocks: Iterable[nn.Module], choice: str) -> Transform | None:
    """What to do with each module as its weights arrive: quantize the Linears inside `blocks`. None for `none`.

    One Linear at a time, and that in slices, because quantizing needs several times its input's size for a moment.
    """
    if choice == "none":
        return None
    inside = {id(layer) for block in blocks for layer in block.modules()}

    def quantize(name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear) or id(module) not in inside:
            return None
        if WEIGHT_FORMATS[choice].library == "bitsandbytes":
            from autotune.quantization.bitsandbytes_layer import layer_of

            return layer_of(module, choice, slice_bytes_of(module.weight))
        layerwise = choice == LAYERWISE
        module.weight = as_float8(module) if layerwise else quantized_in_slices(module, torchao_config(choice))
        freeze(module)
        return None

    return quantize


def slice_bytes_of(weight: torch.Tensor) -> int:
    """How much of `weight` is quantized at a time."""
    return CPU_SLICE_BYTES if weight.is_cpu else SLICE_BYTES


def quantized_in_slices(layer: nn.Linear, config: Any) -> nn.Parameter:
    """torchao's quantized weight of `layer`, from some rows at a time: a row has its own scale, so the bits are equal.

    torchao takes many times what it is given for a moment: now of a slice, before of the layer.
    """
    weight = layer.weight.data
    num_rows, num_columns = weight.shape
    step = max(1, slice_bytes_of(weight) // max(1, num_columns * weight.element_size()))
    if weight.is_meta:  # nothing is held; a trace needs the shapes alone
        step = num_rows
    whole: dict[str, torch.Tensor] = {}
    for start in range(0, num_rows, step):
        kind, parts, context = _quantized_rows(weight[start : start + step], config)
        for name, part in parts.items():
            if name not in whole:
                whole[name] = part.new_empty((num_rows, *part.shape[1:]))
            whole[name][start : start + len(part)] = part
        del parts, part  # or they would stay while the next slice is quantized
    return nn.Parameter(kind.__tensor_unflatten__(whole, context, weight.shape, weight.stride()), requires_grad=False)


def _quantized_rows(rows: torch.Tensor, config: Any) -> "tuple[Any, dict[str, torch.Tensor], Any]":
    """torchao's tensor class for `rows` of a weight, the plain tensors inside, and what else the class needs."""
    from torchao.quantization import quantize_

    layer = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    quantize_(layer, config)
    # Taken out of the layer: torchao binds a method to it, a cycle that lives until the collector comes by.
    quantized: Any = layer._parameters.pop("weight")
    names, context = quantized.__tensor_flatten__()
    return type(quantized), {name: getattr(quantized, name) for name in names}, context


def torchao_config(choice: str) -> Any:
    """How torchao is told about a storage of its own."""
    from torchao import quantization

    return getattr(quantization, WEIGHT_FORMATS[choice].config)()
