"""Optimizer of the adapter: fused AdamW on fp32 masters. A rule settles it, no search."""

from autotune.knobs.base import Choices, Knob, Parity, TuningContext
from autotune.schema import Choice

AGAINST_8BIT = (
    "it would save at most 6 of the 18 bytes that training needs for each parameter of an adapter, which is small, "
    "and steps each of its many small tensors by itself: about 0.4 s a step"
)


class Optimizer(Knob):
    """8-bit moments pay if all weights are trained, not for adapters."""

    name = "optimizer"
    title = "optimizer"
    names = ("adamw",)

    def choices(self, context: TuningContext) -> Choices:
        return Choices(("adamw",), rejected={"adamw-8bit": AGAINST_8BIT})

    def parity(self, choice: Choice) -> Parity | None:
        return Parity(choice, 1e-3, "one fused kernel in fp32, where single operations round at each")
