"""Attention backend. Only those whose backward pass is right are ever admitted."""

from typing import TYPE_CHECKING

from autotune.backends import ATTENTION_BACKENDS
from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Candidate, Choice

if TYPE_CHECKING:
    from torch import nn


class Attention(Knob):
    """The backends that this machine can use."""

    name = "attention"
    title = "attention"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, backend in ATTENTION_BACKENDS.items() if not backend.unusable_reason)

    def choices(self, context: TuningContext) -> Choices:
        hardware, admitted = context.hardware, []
        rejected: dict[Choice, str] = {}
        for name in self.names:
            capability = hardware.capability(ATTENTION_BACKENDS[name].capability)
            why = ATTENTION_BACKENDS[name].skip_reason(hardware) if capability.available else capability.reason
            if why is None:
                admitted.append(name)
            else:
                rejected[name] = why
        return Choices(tuple(admitted), rejected)

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        name = candidate.attention
        backend = ATTENTION_BACKENDS.get(name)
        if backend is None or not backend.refuses_masks:
            return None
        if not context.family.has_attention_mask(candidate.micro_batch_size, context.workload.text_padding):
            return None
        return f"{name} refuses masks, and captions of different lengths in one batch, dropped ones too, need one"

    def parity(self, choice: Choice) -> Parity | None:
        backend = ATTENTION_BACKENDS.get(str(choice))
        return Parity(choice, backend.tolerance, backend.tolerance_reason) if backend and backend.tolerance else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        transformer.set_attention_backend(ATTENTION_BACKENDS[str(choice)].diffusers_name())  # type: ignore[operator]
