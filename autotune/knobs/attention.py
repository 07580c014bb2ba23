"""Attention backend, under diffusers' names. Only those whose backward pass is right are ever admitted."""

from typing import TYPE_CHECKING

from autotune.families.base import Family
from autotune.knobs.base import Choices, Knob, Setting
from autotune.schema import Candidate, Choice, Rejected

if TYPE_CHECKING:
    from torch import nn

BACKENDS = ("native", "_native_flash", "_native_math", "_native_efficient", "_native_cudnn", "flash", "xformers")
"""Backends that can train somewhere; the machine's gates say where. `native` lets torch choose."""

REFUSES_MASKS = frozenset({"_native_flash", "flash"})
"""These raise on any mask, even one that is all True."""


class Attention(Knob):
    """The backends that this machine's gates let through."""

    name = "attention"

    def choices(self, setting: Setting) -> Choices:
        gates = {name: setting.hardware.gate(f"attention.{name}") for name in BACKENDS}
        return Choices(
            admitted=tuple(name for name, gate in gates.items() if gate.available),
            rejected=tuple(
                Rejected(choice=name, reason=gate.reason) for name, gate in gates.items() if not gate.available
            ),
        )

    def conflict(self, candidate: Candidate, setting: Setting) -> str | None:
        masked = setting.family.masks(candidate.micro_batch_size, setting.workload.text_padding)
        if masked and candidate.attention in REFUSES_MASKS:
            return f"{candidate.attention} refuses masks, and captions of different lengths in one batch need one"
        return None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        transformer.set_attention_backend(choice)  # type: ignore[operator]
