"""What a parent asks of a trial's child: plain data that crosses to it, and the work by name, imported there alone."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.schema import CachingSettings, Candidate, TrialResult, Workload

SETTLED_SPREAD = 0.1
"""Of the median: steps whose middle half differs by more are repeated, as on a machine that others use."""
MOST_REPEATS = 4
LEAST_HOPELESS_STEPS = 2
"""The step after the one that is measured for memory is cold: on a processor it took up to 1.6 times the next ones."""
EXTRA_SECONDS = 5.0
"""No further steps once the timed ones have taken this long."""
LEAST_STEPS, MOST_STEPS = 10, 40
STEADY = 0.03
"""Difference between the medians of both halves of a rehearsal's steps, up to which they are steady."""


class Request(Protocol):
    """Something to do in the child."""

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> Any:
        """The answer. `kept` lives as long as the child; `tell` gives what is known so far, should the end not come."""


@dataclass(frozen=True)
class TrialRequest:
    """One candidate to run for a few steps, on the model in the child, which is loaded where it is not."""

    model: str
    """What the user calls the model."""
    workload: Workload
    candidate: Candidate
    device: str
    num_steps: int
    """Steady optimizer steps to time."""
    hopeless_seconds: float | None = None
    """Two steady steps slower than this end the trial: others are clearly faster."""

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> TrialResult:
        from autotune.trials.steps import run_trial

        return run_trial(self, kept)

    def goes_on(self, times: list[float]) -> bool:
        """Whether another step is worth its time after steady ones of `times` seconds."""
        enough = len(times) >= LEAST_HOPELESS_STEPS
        if enough and self.hopeless_seconds is not None and min(times) > self.hopeless_seconds:
            return False
        return len(times) < self.num_steps or self._unsettled(times)

    def _unsettled(self, times: list[float]) -> bool:
        middle = sorted(times)[len(times) // 4 : -(len(times) // 4) or None]
        disagree = max(middle) - min(middle) > SETTLED_SPREAD * middle[len(middle) // 2]
        return disagree and len(times) < MOST_REPEATS * self.num_steps and sum(times) < EXTRA_SECONDS


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest(TrialRequest):
    """One candidate to run through every phase: caching, loading, training, previews and saving.

    Without the model's files only loading (random weights), training and saving can be.
    """

    caching: CachingSettings
    most_seconds: float
    """No further steps after so much of training."""
    scratch: str | None = None
    """Folder to write in, which the parent removes, however the child ends; by default the system's."""

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> TrialResult:
        from autotune.trials.phases import rehearse

        return rehearse(self, tell)

    def goes_on(self, times: list[float]) -> bool:
        """Until the second half of the steps is as fast as the first, within the time there is."""
        in_time = sum(times) < self.most_seconds
        if len(times) < self.num_steps or (len(times) < LEAST_STEPS and in_time):
            return True
        first, second = (statistics.median(half) for half in (times[: len(times) // 2], times[len(times) // 2 :]))
        return abs(second - first) > STEADY * first and len(times) < MOST_STEPS and in_time


@dataclass(frozen=True)
class GradientRequest:
    """One candidate to hold against the reference. The answer is the root mean square of its tensors' errors."""

    family: str
    config: Mapping[str, Any]
    """Constructor arguments of the tiny transformer."""
    workload: Workload
    """Shapes to run, small ones."""
    candidate: Candidate
    device: str

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> float:
        from autotune.trials.gradients import gradient_error

        return gradient_error(self, kept)


@dataclass(frozen=True)
class UpdateRequest:
    """An optimizer to hold against the reference. The answer is the root mean square of its tensors' errors."""

    candidate: Candidate
    device: str

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> float:
        from autotune.trials.gradients import update_error

        return update_error(self)
