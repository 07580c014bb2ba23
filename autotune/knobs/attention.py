"""Attention backend, under diffusers' names. Only those whose backward pass is right are ever admitted."""

from typing import TYPE_CHECKING

from autotune.families import Family
from autotune.hardware import older
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Candidate, Choice, HardwareProfile

if TYPE_CHECKING:
    from torch import nn

BACKENDS = ("native", "_native_flash", "_native_math", "_native_efficient", "_native_cudnn", "flash", "xformers")
"""Backends that can train somewhere; the machine's capabilities say where. `native` lets torch choose."""

CUDNN_WINS = (9, 10)
"""Major compute capabilities on which cuDNN attention has beaten flash (1.7 to 2.3 times on Hopper)."""

CUDNN_PREFERRED = "9.15.1"
"""On those, torch's dispatcher asks this and newer versions of cuDNN first, with and without a mask
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`, torch 2.11 to 2.14)."""

REFUSES_MASKS = frozenset({"_native_flash", "flash"})
"""These raise on any mask, even one that is all True."""


class Attention(Knob):
    """The backends that this machine can use."""

    name = "attention"
    title = "attention"
    names = BACKENDS

    def choices(self, context: TuningContext) -> Choices:
        capabilities = {name: context.hardware.capability(f"attention.{name}") for name in BACKENDS}
        reasons = {
            name: _pointless(name, context) if capability.available else capability.reason
            for name, capability in capabilities.items()
        }
        admitted = tuple(name for name, reason in reasons.items() if not reason)
        return Choices(admitted, {name: reason for name, reason in reasons.items() if reason})

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        masked = context.family.has_attention_mask(candidate.micro_batch_size, context.workload.text_padding)
        if masked and candidate.attention in REFUSES_MASKS:
            name = candidate.attention
            return f"{name} refuses masks, and captions of different lengths in one batch, dropped ones too, need one"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        if choice == "native":
            return None
        return Parity(choice, 0.02, "another kernel sums in another order and rounds other intermediate results")

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        transformer.set_attention_backend(choice)  # type: ignore[operator]


def prefers_cudnn(hardware: HardwareProfile) -> bool:
    """Whether `native` is cuDNN's kernel in half precision, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is set."""
    major = (hardware.device.compute_capability or (0, 0))[0]
    return major in CUDNN_WINS and not older(hardware.versions.cudnn, CUDNN_PREFERRED)


def _pointless(name: str, context: TuningContext) -> str | None:
    """Why a backend that works on this GPU is not worth a trial; None when it is. On a CPU all are tried."""
    device = context.hardware.device
    if device.kind != "cuda":
        return None
    if name == "_native_math":
        return "it writes out all pairs of tokens: slower and larger than any fused kernel on a GPU"
    if name in ("_native_flash", "_native_efficient") or (name == "_native_cudnn" and prefers_cudnn(context.hardware)):
        return "native takes this kernel by itself wherever it is the best that torch has"
    if name == "_native_cudnn" and (device.compute_capability or (0, 0))[0] not in CUDNN_WINS:
        return "cuDNN's kernel wins on Hopper and data-center Blackwell, and loses elsewhere"
    return None
