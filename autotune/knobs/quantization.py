"""How frozen base weights are stored: fewer bytes, sometimes more time. Adapters are never
quantized."""

from typing import TYPE_CHECKING

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import WHOLE_WEIGHTS, Choices, Knob, Parity, TuningContext
from autotune.knobs.quantized_layers import quantize_inside
from autotune.models.family import Family
from autotune.plan.candidate import Choice
from autotune.plan.workload import Workload

if TYPE_CHECKING:
    from torch import nn


class Quantization(Knob):
    """Weights alone are quantized, and dequantized for each product: gradients flow through the
    true operation."""

    name = "quantization"
    needs_reload = True

    def describe(self, choice: Choice, workload: Workload) -> str:
        return "no quantization" if choice == "none" else str(choice)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(WEIGHT_FORMATS)

    def choices(self, context: TuningContext) -> Choices:
        admitted: list[Choice] = []
        rejected: dict[Choice, str] = {}
        on_request: dict[Choice, str] = {}
        floor = context.workload.quality
        for name, weight_format in WEIGHT_FORMATS.items():
            capability = context.hardware.capability(weight_format.capability)
            if weight_format.quantize and context.workload.adapter == "dora":
                rejected[name] = WHOLE_WEIGHTS
            elif not weight_format.meets(floor):
                rejected[name] = (
                    f"the quality floor is {floor}; this needs --quality {weight_format.quality}"
                )
            elif weight_format.quantize and not capability.available:
                rejected[name] = capability.reason
            elif why := weight_format.skip_reason(context.hardware):
                on_request[name] = why
            else:
                admitted.append(name)
        admitted.sort(key=lambda name: WEIGHT_FORMATS[str(name)].bytes_per_parameter)
        return Choices(tuple(admitted), rejected, on_request)

    def parity(self, choice: Choice) -> Parity | None:
        entry = WEIGHT_FORMATS.get(str(choice))
        return (
            Parity(choice, entry.tolerance, entry.tolerance_reason)
            if entry and entry.tolerance
            else None
        )

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        quantize = quantize_inside(family.blocks(transformer), str(choice))
        if quantize is None:
            return
        for name, module in list(transformer.named_modules()):
            replacement = quantize(name, module)
            if replacement is not None:
                transformer.set_submodule(name, replacement)
