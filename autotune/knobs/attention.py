"""Attention backend. Only those whose backward pass is right are ever admitted."""

from typing import TYPE_CHECKING

from autotune.backends import ATTENTION_BACKENDS
from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Candidate, Choice, HardwareProfile

if TYPE_CHECKING:
    from torch import nn


DEFAULT = "native"
MIN_SPEED = 1.03
"""Times the default's measured speed from which a backend is worth a trial: less is within the noise."""


class Attention(Knob):
    """The backends that this machine can use and that it has measured to be faster than the default."""

    name = "attention"
    title = "attention"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, backend in ATTENTION_BACKENDS.items() if not backend.unusable_reason)

    def choices(self, context: TuningContext) -> Choices:
        hardware, admitted = context.hardware, []
        rejected: dict[Choice, str] = {}
        on_request: dict[Choice, str] = {}
        for name in self.names:
            capability = hardware.capability(ATTENTION_BACKENDS[name].capability)
            if not capability.available:
                rejected[name] = capability.reason
            elif ATTENTION_BACKENDS[name].refuses_masks and context.family.has_attention_mask(1, "exact"):
                rejected[name] = f"it takes no masks, and the text of {context.family.name} always has one"
            elif why := ATTENTION_BACKENDS[name].skip_reason(hardware) or _not_faster_reason(name, hardware):
                on_request[name] = why
            else:
                admitted.append(name)
        return Choices(tuple(admitted), rejected, on_request)

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        name = candidate.attention
        backend = ATTENTION_BACKENDS.get(name)
        if backend is None or not backend.refuses_masks:
            return None
        if not context.family.has_attention_mask(candidate.micro_batch_size, context.workload.text_padding):
            return None
        if context.family.has_attention_mask(1, "exact"):
            return f"{name} refuses masks, and the text of {context.family.name} always has one"
        return f"{name} refuses masks, and captions of different lengths in one batch, dropped ones too, need one"

    def parity(self, choice: Choice) -> Parity | None:
        backend = ATTENTION_BACKENDS.get(str(choice))
        return Parity(choice, backend.tolerance, backend.tolerance_reason) if backend and backend.tolerance else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        transformer.set_attention_backend(ATTENTION_BACKENDS[str(choice)].diffusers_name())  # type: ignore[operator]


def _not_faster_reason(name: str, hardware: HardwareProfile) -> str | None:
    """Why a backend is not worth a trial on this GPU, by what the probe measured; None if it is. On a CPU all are."""
    if name == DEFAULT or hardware.device.kind != "cuda":
        return None
    usual, own = (_measured_rates(each, hardware) for each in (DEFAULT, name))
    if not (common := usual.keys() & own.keys()):
        return f"not measured beside {DEFAULT}, which takes the kernel that torch holds for the best"
    longest = max(common, key=lambda shape: int(shape.rpartition(".")[2]))
    speed = own[longest] / usual[longest]
    return None if speed >= MIN_SPEED else f"the probe measured {speed:.2f} times the speed of {DEFAULT}"


def _measured_rates(name: str, hardware: HardwareProfile) -> dict[str, float]:
    """FLOP/s by dtype and number of tokens, e.g. `bf16.4096`."""
    prefix = f"attention.{name}."
    return {rate.name.removeprefix(prefix): rate.value for rate in hardware.rates if rate.name.startswith(prefix)}
