"""Compute dtype of the transformer and the adapter. Master weights of the adapter are always fp32."""

from typing import TYPE_CHECKING

from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Choice

if TYPE_CHECKING:
    import torch

BF16_TOLERANCE = 0.1
"""Relative error of bf16 gradients, against fp32."""


class Precision(Knob):
    """bf16 if the device has it; on CPUs fp32, unless bf16 matmuls were measured to be faster."""

    name = "precision"
    title = "precision"
    names = ("bf16", "fp32")
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        hardware = context.hardware
        if hardware.device.kind != "cpu":
            bf16 = hardware.capability("precision.bf16")
            return Choices(("bf16",)) if bf16.available else Choices(("fp32",), rejected={"bf16": bf16.reason})
        if _fastest_matmul(context, "bf16") > _fastest_matmul(context, "fp32"):
            return Choices(("bf16", "fp32"))
        slower = "bf16 matmuls were not measured to be faster than fp32 on this CPU"
        return Choices(("fp32",), rejected={"bf16": slower})

    def parity(self, choice: Choice) -> Parity | None:
        if choice != "bf16":
            return None
        reason = "8 bits of mantissa: each rounding is wrong by up to 0.4%, and errors add up over layers"
        return Parity(choice, BF16_TOLERANCE, reason)


def _fastest_matmul(context: TuningContext, dtype: str) -> float:
    rates = (rate.value for rate in context.hardware.rates if rate.name.startswith(f"matmul.{dtype}."))
    return max(rates, default=0.0)


def torch_dtype(precision: str) -> "torch.dtype":
    """The dtype that a precision names."""
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
