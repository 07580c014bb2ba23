"""Compute dtype of the transformer and the adapter. Master weights of the adapter are always
fp32.
"""

from typing import TYPE_CHECKING

from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.runtime import lazy_module
from autotune.schema import Choice, HardwareProfile

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

ROUNDING = {
    "bf16": (0.1, "8 bits of mantissa: each rounding is wrong by up to 0.4%"),
    "fp16": (0.03, "11 bits of mantissa: each rounding is wrong by up to 0.05%"),
}
"""Relative error of gradients in a precision, against fp32, and where it comes from."""
BF16_IS_WIDER = "bf16 is as fast, and has the range of fp32: nothing overflows"


class Precision(Knob):
    """bf16 if the device has it; fp16 on GPUs that have no bf16 but tensor cores for fp16; on
    CPUs fp32, unless bf16 matmuls were measured to be faster."""

    name = "precision"
    names = ("bf16", "fp16", "fp32")
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        hardware = context.hardware
        bf16, fp16 = (hardware.capability(f"precision.{name}") for name in ("bf16", "fp16"))
        if hardware.device.kind == "cpu":
            slow: dict[Choice, str] = {"fp16": fp16.reason}
            if _fastest_matmul(context, "bf16") > _fastest_matmul(context, "fp32"):
                return Choices(("bf16", "fp32"), on_request=slow)
            slow["bf16"] = "bf16 matmuls were not measured to be faster than fp32 on this CPU"
            return Choices(("fp32",), on_request=slow)
        if bf16.available:
            return Choices(("bf16",), on_request={"fp16": BF16_IS_WIDER} if fp16.available else {})
        rejected: dict[Choice, str] = {"bf16": bf16.reason}
        if not fp16.available:
            return Choices(("fp32",), rejected={**rejected, "fp16": fp16.reason})
        if overflow := context.family.fp16_overflow:
            return Choices(("fp32",), rejected=rejected, on_request={"fp16": overflow})
        return Choices(("fp16", "fp32"), rejected=rejected)

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        if choice == "fp16" and hardware.device.kind == "cpu":
            return None  # it works, for tests: no search tries it
        return super().unusable_reason(choice, hardware)

    def parity(self, choice: Choice) -> Parity | None:
        tolerance, reason = ROUNDING.get(str(choice), (0.0, ""))
        return (
            Parity(choice, tolerance, f"{reason}, and errors add up over layers")
            if tolerance
            else None
        )


def _fastest_matmul(context: TuningContext, dtype: str) -> float:
    rates = (
        rate.value for rate in context.hardware.rates if rate.name.startswith(f"matmul.{dtype}.")
    )
    return max(rates, default=0.0)


def torch_dtype(precision: str) -> "torch.dtype":
    """The dtype that a precision names."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def encoder_precision(precision: str) -> str:
    """Precision of text encoders and the VAE beside a transformer in `precision`: fp32 beside one
    in fp16.

    In fp16 activations overflow in T5 (huggingface/transformers#9295) and SDXL's VAE
    (madebyollin/sdxl-vae-fp16-fix).
    """
    return "fp32" if precision == "fp16" else precision


def encoder_element_bytes(precision: str) -> int:
    """Bytes of one of their weights that is not quantized."""
    return 4 if encoder_precision(precision) == "fp32" else 2
