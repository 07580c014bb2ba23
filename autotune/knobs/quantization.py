"""How frozen base weights are stored: fewer bytes, sometimes more time. Adapters are never quantised."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autotune.families.base import Family
from autotune.knobs.base import Choices, Knob, Parity, Setting
from autotune.schema import Choice, Quality
from autotune.weights.streaming import Transform

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Storage:
    """One way to store frozen weights."""

    quality: Quality
    """The strictest floor that admits it."""
    bytes_per_parameter: float
    """With its scales."""
    tolerance: float = 0.0
    """Of gradients with random weights, relative to unquantised ones'; 0 where nothing is quantised."""
    because: str = ""
    """Where that error comes from."""
    library: Literal["torchao", "bitsandbytes"] | None = None
    """Whose tensors hold the weights; None for torch's own."""
    config: str = ""
    """Name of the class that tells torchao how."""


STORAGES: Mapping[str, Storage] = {
    "none": Storage("exact", 2.0),
    "torchao-int8": Storage(
        "high", 1.0, 0.05, "8 bits per row: weights are wrong by about 1%", "torchao", "Int8WeightOnlyConfig"
    ),
    "torchao-fp8": Storage(
        "high", 1.0, 0.12, "3 bits of mantissa: weights are wrong by about 3%", "torchao", "Float8WeightOnlyConfig"
    ),
    "layerwise-fp8": Storage(
        "high", 1.0, 0.15, "3 bits of mantissa and no scales: weights are wrong by 3%, small ones by more"
    ),
    "bnb-int8": Storage(
        "high", 1.0, 0.08, "8 bits for weights and, in the forward pass, for activations", "bitsandbytes"
    ),
    "bnb-nf4": Storage("compact", 0.52, 0.5, "4 bits: weights are wrong by about 10%", "bitsandbytes"),
}
"""By name. nf4: half a byte, and doubly quantised scales of 64 values each. Errors of gradients, as measured on tiny
models of all families: 1 to 2% of int8, 6 to 11% and 6 to 12% of the float8s, 22 to 38% of nf4, by weights alone."""

LAYERWISE = "layerwise-fp8"
AGAINST_LAYERWISE = (
    "as small as torchao-int8 and at most some per cent faster, but three to six times as far from the real weights, "
    "and further where they are small: without scales, what is below 0.016 loses bits"
)
"""Errors of a layer's outputs, normal weights: int8 0.9% at any size; float8 without scales 2.7% at a standard
deviation of 0.05, 3.3% at 0.02, 5.7% at 0.01, beyond the 5% of `--quality high`."""

AGAINST_LLM_INT8 = (
    "on a processor its products are plain operations in fp32 that need 16 bytes an output for a moment; torchao-int8 "
    "stores as little and multiplies at once"
)

NF4_BLOCK = 64
"""Weights per absolute maximum."""
NESTED_BLOCK = 256
"""Absolute maxima per fp32 scale of theirs, with double quantisation."""

SLICE_BYTES = 4 << 20
CPU_SLICE_BYTES = 1 << 20
"""Of a weight, quantised at a time: the smaller stays in a processor's caches; on a GPU it would be launches."""

STRICTNESS: tuple[Quality, ...] = ("compact", "high", "exact")


class Quantization(Knob):
    """Weight-only storage, dequantised for each matmul, so that gradients flow through the true operation."""

    name = "quantization"
    title = "base weights"
    names = tuple(STORAGES)
    needs_reload = True

    def choices(self, setting: Setting) -> Choices:
        admitted: list[Choice] = []
        rejected: dict[Choice, str] = {}
        for name, storage in STORAGES.items():
            gate = setting.hardware.gate(f"quantization.{name}")
            if STRICTNESS.index(storage.quality) < STRICTNESS.index(setting.workload.quality):
                floor = setting.workload.quality
                rejected[name] = f"the quality floor is {floor}; this needs --quality {storage.quality}"
            elif name != "none" and not gate.available:
                rejected[name] = gate.reason
            else:
                admitted.append(name)
        admitted.sort(key=lambda name: STORAGES[str(name)].bytes_per_parameter)
        worse: dict[Choice, str] = {LAYERWISE: AGAINST_LAYERWISE} if "torchao-int8" in admitted else {}
        if worse and setting.hardware.device.kind == "cpu":
            worse["bnb-int8"] = AGAINST_LLM_INT8
        on_request = {name: why for name, why in worse.items() if name in admitted}
        return Choices(tuple(name for name in admitted if name not in worse), rejected, on_request)

    def parity(self, choice: Choice) -> Parity | None:
        storage = STORAGES[str(choice)]
        return Parity(choice, storage.tolerance, storage.because) if storage.tolerance else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        quantize = quantize_inside(family.blocks(transformer), str(choice))
        if quantize is None:
            return
        for name, module in list(transformer.named_modules()):
            replacement = quantize(name, module)
            if replacement is not None:
                transformer.set_submodule(name, replacement)


def quantize_inside(blocks: "Iterable[nn.Module]", choice: str) -> Transform | None:
    """What to do with each module as its weights arrive: quantise the Linears inside `blocks`. None for `none`.

    One Linear at a time, and that in slices, because quantising needs several times its input's size for a moment.
    """
    from torch import nn

    if choice == "none":
        return None
    inside = {id(layer) for block in blocks for layer in block.modules()}

    def quantize(name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear) or id(module) not in inside:
            return None
        if STORAGES[choice].library == "bitsandbytes":
            from autotune.knobs.bitsandbytes_layer import layer_of

            return layer_of(module, choice, slice_bytes_of(module.weight))
        from autotune.knobs.frozen_linear import as_float8, freeze

        layerwise = choice == LAYERWISE
        module.weight = as_float8(module) if layerwise else quantised_in_slices(module, torchao_config(choice))
        freeze(module)
        return None

    return quantize


def slice_bytes_of(weight: "torch.Tensor") -> int:
    """How much of `weight` is quantised at a time."""
    return CPU_SLICE_BYTES if weight.is_cpu else SLICE_BYTES


def quantised_in_slices(layer: "nn.Linear", config: Any) -> "nn.Parameter":
    """torchao's quantised weight of `layer`, from some rows at a time: a row has its own scale, so the bits are equal.

    torchao takes many times what it is given for a moment: now of a slice, before of the layer.
    """
    import torch
    from torch import nn

    weight = layer.weight.data
    num_rows, num_columns = weight.shape
    step = max(1, slice_bytes_of(weight) // max(1, num_columns * weight.element_size()))
    if weight.is_meta:  # nothing is held; a trace needs the shapes alone
        step = num_rows
    whole: dict[str, torch.Tensor] = {}
    for start in range(0, num_rows, step):
        kind, parts, context = _quantised_rows(weight[start : start + step], config)
        for name, part in parts.items():
            if name not in whole:
                whole[name] = part.new_empty((num_rows, *part.shape[1:]))
            whole[name][start : start + len(part)] = part
        del parts, part  # or they would stay while the next slice is quantised
    return nn.Parameter(kind.__tensor_unflatten__(whole, context, weight.shape, weight.stride()), requires_grad=False)


def _quantised_rows(rows: "torch.Tensor", config: Any) -> "tuple[Any, dict[str, torch.Tensor], Any]":
    """torchao's tensor class for `rows` of a weight, the plain tensors inside, and what else the class needs."""
    from torch import nn
    from torchao.quantization import quantize_

    layer = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    quantize_(layer, config)
    # Taken out of the layer: torchao binds a method to it, a cycle that lives until the collector comes by.
    quantised: Any = layer._parameters.pop("weight")
    names, context = quantised.__tensor_flatten__()
    return type(quantised), {name: getattr(quantised, name) for name in names}, context


def torchao_config(choice: str) -> Any:
    """How torchao is told about a storage of its own."""
    from torchao import quantization

    return getattr(quantization, STORAGES[choice].config)()
