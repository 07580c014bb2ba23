"""Norm, rotary positions and joining of queries and keys: diffusers' operations, or one function of our own."""

from typing import TYPE_CHECKING

from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext, unavailable_reason
from autotune.schema import Candidate, Choice, HardwareProfile

if TYPE_CHECKING:
    from torch import nn


class NormRope(Knob):
    """`stock`, `fused`, or `compiled` where torch.compile works."""

    name = "norm_rope"
    title = "norm and rope"
    names = ("stock", "fused", "compiled")

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        return unavailable_reason(hardware, "compile") if choice == "compiled" else None

    def choices(self, context: TuningContext) -> Choices:
        why = "it computes what fused does, which keeps less and runs fewer operations: pin it to compare"
        compiles = context.hardware.capability("compile")
        if compiles.available:
            return Choices(("compiled", "fused"), on_request={"stock": why})
        return Choices(("fused",), {"compiled": compiles.reason}, {"stock": why})

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.norm_rope == "compiled" and candidate.compile != "off":
            return "compiled blocks compile it themselves"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        reason = "fp32 between the projections and attention, where diffusers' operations round"
        return Parity(choice, 0.01, reason) if choice != "stock" else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        from autotune.attention import use_kernels

        use_kernels(transformer, family.attention_layouts, str(choice))
