"""Attention backend. Only those whose backward pass is right are ever admitted."""

from typing import TYPE_CHECKING

from autotune.knobs.attention_backends import ATTENTION_BACKENDS, assumed_efficiency, cuda_kernel
from autotune.knobs.entries import AttentionBackend, Kernel
from autotune.knobs.knob import Choices, Knob, Parity, TuningContext
from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile

if TYPE_CHECKING:
    from torch import nn


DEFAULT = "native"
MIN_SPEED = 1.03
"""Times the default's measured speed from which a backend is worth a trial: less is within the
noise."""


class Attention(Knob):
    """The backends that this machine can use and that it has measured to be faster than the
    default."""

    name = "attention"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            name for name, backend in ATTENTION_BACKENDS.items() if not backend.unusable_reason
        )

    def choices(self, context: TuningContext) -> Choices:
        hardware, admitted = context.hardware, []
        rejected: dict[Choice, str] = {}
        on_request: dict[Choice, str] = {}
        for name in self.names:
            capability = hardware.capability(ATTENTION_BACKENDS[name].capability)
            if not capability.available:
                rejected[name] = capability.reason
            elif ATTENTION_BACKENDS[name].refuses_masks and context.family.has_attention_mask(
                1, "exact"
            ):
                rejected[name] = (
                    f"it takes no masks, and the text of {context.family.name} always has one"
                )
            elif why := ATTENTION_BACKENDS[name].skip_reason(hardware) or _not_faster_reason(
                name, context
            ):
                on_request[name] = why
            else:
                admitted.append(name)
        return Choices(tuple(admitted), rejected, on_request)

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        name = candidate.attention
        backend = ATTENTION_BACKENDS.get(name)
        if backend is None or not backend.refuses_masks:
            return None
        if not context.family.has_attention_mask(
            candidate.micro_batch_size, context.workload.text_padding
        ):
            return None
        if context.family.has_attention_mask(1, "exact"):
            return f"{name} refuses masks, and the text of {context.family.name} always has one"
        return (
            f"{name} refuses masks, and captions of different lengths in one batch, dropped "
            "ones "
            "too, need one"
        )

    def parity(self, choice: Choice) -> Parity | None:
        backend = ATTENTION_BACKENDS.get(str(choice))
        return (
            Parity(choice, backend.tolerance, backend.tolerance_reason)
            if backend and backend.tolerance
            else None
        )

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        transformer.set_attention_backend(ATTENTION_BACKENDS[str(choice)].diffusers_name())  # type: ignore[operator]


def _not_faster_reason(name: str, context: TuningContext) -> str | None:
    """Why a backend is not worth a trial on this GPU, by what the probe measured, or on a card
    of the catalog by what is published for the kernel of a package; None if it is. On a CPU all
    are."""
    hardware, backend = context.hardware, ATTENTION_BACKENDS[name]
    if name == DEFAULT or hardware.device.kind != "cuda":
        return None
    cases = [False, True] if _takes_masks(backend, context) else [False]
    if hardware.origin == "catalog" and backend.needs.library:
        what, speed = (
            "published for its kernel is",
            max(_assumed_speed(name, hardware, masked) for masked in cases),
        )
    else:
        found = [
            _measured_speed(name, _measured_as(DEFAULT, hardware, masked), hardware)
            for masked in cases
        ]
        if not any(found):
            return (
                f"not measured beside {DEFAULT}, which takes the kernel that torch holds for "
                "the "
                "best"
            )
        what, speed = "the probe measured", max(each or 0.0 for each in found)
    return None if speed >= MIN_SPEED else f"{what} {speed:.2f} times the speed of {DEFAULT}"


def _takes_masks(backend: AttentionBackend, context: TuningContext) -> bool:
    """Whether the backend would be given masks in micro-batches of several, because captions
    differ in length."""
    work, family = context.workload, context.family
    always = family.has_attention_mask(1, "exact")  # of the text alone
    is_masked = not always and family.has_attention_mask(
        work.effective_batch_size, work.text_padding
    )
    return is_masked and not backend.refuses_masks


def _kernel(name: str, hardware: HardwareProfile, masked: bool) -> Kernel:
    capability, cudnn = hardware.device.compute_capability, hardware.versions.cudnn
    return cuda_kernel(name, masked=masked, precision="bf16", capability=capability, cudnn=cudnn)


def _assumed_speed(name: str, hardware: HardwareProfile, masked: bool) -> float:
    """Times the default's speed, with or without a mask, by published figures."""
    own, usual = (
        assumed_efficiency(_kernel(each, hardware, masked), hardware.device.compute_capability)
        for each in (name, DEFAULT)
    )
    return own / usual


def _measured_as(name: str, hardware: HardwareProfile, masked: bool) -> str:
    """The backend whose measurements, which are without a mask, tell how fast `name` is."""
    changes = masked and _kernel(name, hardware, masked=True) != _kernel(
        name, hardware, masked=False
    )
    return "_native_efficient" if changes else name


def _measured_speed(name: str, usual: str, hardware: HardwareProfile) -> float | None:
    """Times the speed of `usual` in the longest shape that both were measured in; None if there
    is none."""
    theirs, own = (_measured_rates(each, hardware) for each in (usual, name))
    if not (common := theirs.keys() & own.keys()):
        return None
    longest = max(common, key=lambda shape: int(shape.rpartition(".")[2]))
    return own[longest] / theirs[longest]


def _measured_rates(name: str, hardware: HardwareProfile) -> dict[str, float]:
    """FLOP/s by dtype and number of tokens, e.g. `bf16.4096`."""
    prefix = f"attention.{name}."
    return {
        rate.name.removeprefix(prefix): rate.value
        for rate in hardware.rates
        if rate.name.startswith(prefix)
    }
