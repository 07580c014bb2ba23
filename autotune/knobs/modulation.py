"""Modulation ahead of time: layers that depend on the noise level alone need not be on the device,
nor run in a step.

The noise levels of all draws are known before a run, so what the layers make of them is computed
for a window of coming draws at a time, on the device, layer by layer. Steps get the results; the
layers themselves are never loaded.
"""

from functools import cache
from typing import TYPE_CHECKING

from autotune.knobs.knob import Choices, Knob, Parity, TuningContext
from autotune.models.adapter import target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.workload import Workload

if TYPE_CHECKING:
    from torch import nn

MAX_WINDOW_BYTES = 1 << 30
"""Limit on the host's memory for the modulations of a window, however long the run; but a window is
one step at least."""
MAX_WINDOW_DRAWS = 256
"""More make the products hardly faster, and a small model's window only longer to wait for."""


def window_steps(row_bytes: int, images_per_step: int) -> int:
    """Optimizer steps of a window, for modulations of `row_bytes` a draw and so many images of
    this process a step."""
    draws = min(MAX_WINDOW_DRAWS, MAX_WINDOW_BYTES // max(1, row_bytes))
    return max(1, draws // images_per_step)


class Modulation(Knob):
    """`resident` as the model has it, or `ahead`."""

    name = "modulation"
    names = ("resident", "ahead")
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        reason = _unsuited_reason(context)
        return (
            Choices(("resident",), {"ahead": reason}) if reason else Choices(("ahead", "resident"))
        )

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.modulation != "ahead":
            return None
        if candidate.compile != "off":
            return (
                "every block would be compiled by itself, as each takes another part of the "
                "modulations"
            )
        return _unsuited_reason(context)

    def parity(self, choice: Choice) -> Parity | None:
        return (
            Parity(choice, 1e-5, "the same products, for several draws at a time")
            if choice == "ahead"
            else None
        )

    def describe(self, choice: Choice, workload: Workload) -> str:
        return (
            "computed ahead of the steps, layers not loaded"
            if choice == "ahead"
            else "layers on the device"
        )

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        """Once per loaded model, before an adapter is added: the layers leave it, and are asked
        from where they lie."""
        from autotune.knobs.modulation_ahead import take_loaded_layers

        if choice == "ahead":
            take_loaded_layers(family, transformer)


def _unsuited_reason(context: TuningContext) -> str | None:
    """Why modulations of this model cannot be computed ahead for this work; None if they can."""
    family, layers = context.family, context.family.modulation
    if layers is None:
        return family.excluded.get("modulation", "the family names no modulation layers")
    adapted = _find_adapted_layer(family, context.workload.targets)
    return f"the adapter changes modulation layers, such as {adapted}" if adapted else None


@cache
def _find_adapted_layer(family: Family, targets: str) -> str | None:
    """A modulation layer that the set of adapted layers has, by peft's rule; None if it has
    none."""
    assert family.modulation is not None
    is_adapted = target_matcher(family, targets)
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    return next((layer for _, layer in family.modulation.find(model) if is_adapted(layer)), None)
