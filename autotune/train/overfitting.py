"""What losses on held-out images tell over a run: when they were lowest, and when they began to
rise for good. Pure.

Every measurement is of the same draws, so two are compared draw by draw: what counts is whether
their differences are more than chance, not how far draws differ among each other.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CERTAINTY = 2.0
"""Standard errors by which a loss must be above the lowest to count as risen."""
NUM_RISES = 2
"""Measurements in a row that must have risen until overfitting is named."""


@dataclass
class ValidationHistory:
    """The measurements of a run, one after another."""

    base: list[float]
    """Loss of each draw without the adapter."""
    lowest: list[float] = field(default_factory=list)
    """Loss of each draw when their mean was lowest, which may be without the adapter."""
    lowest_step: int = 0
    """How many steps had been taken then; 0 without the adapter."""
    best_loss: float = math.inf
    """Lowest mean with the adapter."""
    best_step: int = 0
    final_loss: float = math.nan
    """Mean of the last measurement."""
    num_rises: int = 0
    overfitting_from: int | None = None

    def __post_init__(self) -> None:
        self.lowest = self.lowest or self.base

    def add(self, step: int, losses: Sequence[float]) -> bool:
        """Count the measurement after `step`; returns whether the adapter is the best so far.

        One that is not finite is unknown: it says nothing of overfitting.
        """
        self.final_loss = loss = statistics.fmean(losses)
        if not math.isfinite(loss):
            return False
        is_best = loss < self.best_loss
        if is_best:
            self.best_loss, self.best_step = loss, step
        if loss < statistics.fmean(self.lowest):
            self.lowest, self.lowest_step, self.num_rises, self.overfitting_from = (
                list(losses),
                step,
                0,
                None,
            )
        else:
            self.num_rises = self.num_rises + 1 if _has_risen(self.lowest, losses) else 0
            if self.num_rises == NUM_RISES:
                self.overfitting_from = self.lowest_step
        return is_best

    @property
    def base_loss(self) -> float:
        """Mean loss without the adapter."""
        return statistics.fmean(self.base)

    @property
    def warning(self) -> str | None:
        """That overfitting has begun, if the last measurement tells so for the first time."""
        if (
            self.overfitting_from is None
            or self.num_rises != NUM_RISES
            or not math.isfinite(self.final_loss)
        ):
            return None
        losses = f"now {self.final_loss:.4f}, lowest {statistics.fmean(self.lowest):.4f}"
        if self.overfitting_from == 0:
            return (
                f"the loss on held-out images is above the model's own and rises: {losses} "
                "without "
                "the adapter"
            )
        return (
            f"overfitting began after step {self.overfitting_from}: on held-out images the "
            "loss "
            f"rises, {losses} there"
        )

    @property
    def known_final_loss(self) -> float | None:
        """Mean of the last measurement; None if it is not finite."""
        return self.final_loss if math.isfinite(self.final_loss) else None

    def state(self) -> dict[str, Any]:
        """All that the constructor needs to go on, as JSON; only after a measurement."""
        return asdict(self)


def _has_risen(before: Sequence[float], after: Sequence[float]) -> bool:
    differences = [b - a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > CERTAINTY * error
