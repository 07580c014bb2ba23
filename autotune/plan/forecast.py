"""What the cost model says of a plan's settings and of what else there was: frozen with the
plan, for reports."""

from typing import Self

from pydantic import Field, model_validator

from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.prediction import StepTime

MAX_ALTERNATIVES = 512
"""Maximum number for one plan; autotune records fewer."""


class Alternative(Frozen):
    """A candidate and its prediction: as first predicted if a trial ran it, else corrected by
    all trials."""

    changes: dict[str, Choice]
    """Values of the knobs that differ from the plan's settings; empty for these settings."""
    step_seconds: float = Field(gt=0)
    """Wall time of an optimizer step, to five digits."""
    step_memory_bytes: int = PositiveInt
    """Peak of a training step, as the device's allocator counts it."""
    run_memory_bytes: int = PositiveInt
    """What the phase that needs most takes of the device, which the budget must hold."""

    @model_validator(mode="after")
    def _changes_are_knobs(self) -> Self:
        if unknown := self.changes.keys() - Candidate.model_fields:
            raise ValueError(f"there is no setting {min(unknown)!r}")
        return self

    def candidate(self, settings: Candidate) -> Candidate:
        """All of its values. Raises ValidationError if a value is of the wrong kind."""
        return settings.changed(**self.changes)


class PhaseForecast(Frozen):
    """Device memory that a phase of a run is predicted to need."""

    name: str
    run_memory_bytes: int = NaturalInt


class Forecast(Frozen):
    """Predictions around a plan's settings."""

    num_candidates: int = PositiveInt
    """Number of candidates that were predicted."""
    num_fitting: int = NaturalInt
    """Number of those that are predicted to fit."""
    step_time: StepTime
    """Seconds of a step by kind of work, at the rates that the probe measured: nothing that
    trials taught."""
    phases: tuple[PhaseForecast, ...] = ()
    alternatives: tuple[Alternative, ...] = Field(default=(), max_length=MAX_ALTERNATIVES)
    """Those that tell most, the plan's settings among them: the Pareto front of memory and time,
    the best with each other value of a knob, what was tried, and the nearest that do not fit."""

    def rebased(self, before: Candidate, after: Candidate) -> Self:
        """The same forecast for a plan that has the settings `after` instead of `before`."""
        rows = (
            each.changed(changes=differences_of(each.candidate(before), after))
            for each in self.alternatives
        )
        return self.changed(alternatives=tuple(rows))


def differences_of(candidate: Candidate, settings: Candidate) -> dict[str, Choice]:
    """The values of `candidate` that are not those of `settings`, by knob."""
    return {name: value for name, value in candidate if value != getattr(settings, name)}
