"""Norm, rotary positions and joining of queries and keys: diffusers' operations, or one function of
our own.

A rule settles it, and the last trial of a search tries the best settings with diffusers' operations
instead. On a CPU the plain operations of `fused` were as fast as compiled ones and need no
start-up. A GPU waits for memory there, and compiled code moves half as much as `fused` and a tenth
of what diffusers' operations do. Where gradients turn out wrong, the next in line is taken.
"""

from typing import TYPE_CHECKING

from autotune.knobs.fused_processor import use_kernels
from autotune.knobs.knob import (
    Choices,
    Knob,
    Parity,
    TuningContext,
    parity_capability,
    unavailable_reason,
)
from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile

if TYPE_CHECKING:
    from torch import nn

STARTUP_SECONDS = 60.0
"""Seconds to compile it, forward and backward, for a model's kinds of attention: 57 to 73 for
three mid-size families on two busy CPU cores, 7 to 9 where torch still had the code. Not
measured on a GPU."""


class NormRope(Knob):
    """`stock`, `fused`, or `compiled` where torch.compile works."""

    name = "norm_rope"
    title = "norm and rope"
    names = ("stock", "fused", "compiled")
    compared_with = "stock"

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        return unavailable_reason(hardware, "compile") if choice == "compiled" else None

    def choices(self, context: TuningContext) -> Choices:
        if not context.family.attention_layouts:
            reason = f"{context.family.name} does not say how its attention is built"
            return Choices(("stock",), dict.fromkeys(("fused", "compiled"), reason))
        hardware = context.hardware
        compiles, kind = hardware.capability("compile"), hardware.device.kind
        order = ["fused", "stock"] if kind == "cpu" else ["stock", "fused"]
        if kind == "cuda":
            order = ["compiled", "fused", "stock"]
        rejected: dict[Choice, str] = {} if compiles.available else {"compiled": compiles.reason}
        usable = [one for one in order if one not in rejected]
        parities = {
            one: unavailable_reason(hardware, parity_capability(self.name, one)) for one in usable
        }
        best = next((one for one, why_wrong in parities.items() if why_wrong is None), "stock")
        why = {"cpu": "it was no faster than fused", "cuda": "it moves more bytes"}.get(
            kind, "it was never measured here"
        )
        others = (one for one in self.names if one != best and one not in rejected)
        return Choices((best,), rejected, dict.fromkeys(others, f"{why}: pin it to compare"))

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.norm_rope != "stock" and candidate.compile != "off":
            return "compiled blocks fuse diffusers' own operations"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        reason = "fp32 between the projections and attention, where diffusers' operations round"
        return Parity(choice, 0.01, reason) if choice != "stock" else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        use_kernels(transformer, family.attention_layouts, str(choice))
