"""How frozen base weights are stored: fewer bytes, sometimes more time. Adapters are never quantized."""

from typing import TYPE_CHECKING

from autotune.backends import LAYERWISE, WEIGHT_FORMATS
from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Choice, Quality

if TYPE_CHECKING:
    from torch import nn


AGAINST_LAYERWISE = (
    "as small as torchao-int8 and at most a few percent faster, but three to six times as far from the real weights, "
    "and further where they are small: without scales, what is below 0.016 loses bits"
)
"""Errors of a layer's outputs, normal weights: int8 0.9% at any size; float8 without scales 2.7% at a standard
deviation of 0.05, 3.3% at 0.02, 5.7% at 0.01, beyond the 5% of `--quality high`."""

AGAINST_LLM_INT8 = (
    "on a processor its products are plain operations in fp32 that need 16 bytes an output for a moment; torchao-int8 "
    "stores as little and multiplies at once"
)

STRICTNESS: tuple[Quality, ...] = ("compact", "high", "exact")


class Quantization(Knob):
    """Weight-only storage, dequantized for each matmul, so that gradients flow through the true operation."""

    name = "quantization"
    title = "base weights"
    names = tuple(WEIGHT_FORMATS)
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        admitted: list[Choice] = []
        rejected: dict[Choice, str] = {}
        for name, storage in WEIGHT_FORMATS.items():
            capability = context.hardware.capability(f"quantization.{name}")
            if STRICTNESS.index(storage.quality) < STRICTNESS.index(context.workload.quality):
                floor = context.workload.quality
                rejected[name] = f"the quality floor is {floor}; this needs --quality {storage.quality}"
            elif name != "none" and not capability.available:
                rejected[name] = capability.reason
            else:
                admitted.append(name)
        admitted.sort(key=lambda name: WEIGHT_FORMATS[str(name)].bytes_per_parameter)
        worse: dict[Choice, str] = {LAYERWISE: AGAINST_LAYERWISE} if "torchao-int8" in admitted else {}
        if worse and context.hardware.device.kind == "cpu":
            worse["bnb-int8"] = AGAINST_LLM_INT8
        on_request = {name: why for name, why in worse.items() if name in admitted}
        return Choices(tuple(name for name in admitted if name not in worse), rejected, on_request)

    def parity(self, choice: Choice) -> Parity | None:
        storage = WEIGHT_FORMATS[str(choice)]
        return Parity(choice, storage.tolerance, storage.because) if storage.tolerance else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        from autotune.quantization import quantize_inside

        quantize = quantize_inside(family.blocks(transformer), str(choice))
        if quantize is None:
            return
        for name, module in list(transformer.named_modules()):
            replacement = quantize(name, module)
            if replacement is not None:
                transformer.set_submodule(name, replacement)
