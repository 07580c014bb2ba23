"""What the parent of a trial asks of its child, and what the child keeps and reports: plain data
that imports no work.

`worker.py` says which function performs which request.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.job import ModelRef
from autotune.plan.trial import Outcome
from autotune.plan.workload import Workload

MAX_SPREAD = 0.1
"""Relative to the median: steps whose middle half differs by more are repeated, as on a machine
that others use."""
MAX_REPEATS = 4
MIN_PRUNING_STEPS = 2
"""The step after the one that is measured for memory is cold: on a CPU it took up to 1.6 times
the next ones."""
MAX_REPEAT_SECONDS = 5.0
"""No step is repeated once the timed ones have taken this long."""
MIN_METERED_SECONDS = 2.0
"""Steady steps that tell energy, as many as a trial takes where it decides: counters move every
20 to 100 ms."""
MIN_REHEARSAL_STEPS, MAX_REHEARSAL_STEPS = 10, 40
MAX_DRIFT = 0.03
"""Relative difference between the medians of both halves of a rehearsal's steps, up to which
they are steady."""


@dataclass(frozen=True)
class TrialRequest:
    """Run one candidate for a few steps on the child's model, which the first request loads.
    Gives a TrialResult."""

    model: ModelRef | str
    workload: Workload
    candidate: Candidate
    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    num_steps: int
    """Steady optimizer steps to time."""
    prune_above_seconds: float | None = None
    """Two steady steps slower than this end the trial: other candidates are clearly faster."""

    def needs_another_step(self, seconds: list[float]) -> bool:
        """Whether another step is worth its time after steady ones that took `seconds`."""
        if self._is_too_short_for_energy(seconds):
            return True
        enough = len(seconds) >= MIN_PRUNING_STEPS
        if (
            enough
            and self.prune_above_seconds is not None
            and min(seconds) > self.prune_above_seconds
        ):
            return False
        return len(seconds) < self.num_steps or self._is_unsteady(seconds)

    def _is_too_short_for_energy(self, seconds: list[float]) -> bool:
        return self.workload.objective == "energy" and sum(seconds) < MIN_METERED_SECONDS

    def _is_unsteady(self, seconds: list[float]) -> bool:
        middle = sorted(seconds)[len(seconds) // 4 : -(len(seconds) // 4) or None]
        disagree = max(middle) - min(middle) > MAX_SPREAD * middle[len(middle) // 2]
        return (
            disagree
            and len(seconds) < MAX_REPEATS * self.num_steps
            and sum(seconds) < MAX_REPEAT_SECONDS
        )


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest(TrialRequest):
    """Run one candidate through every phase: caching, loading, training, previews and saving. Gives
    a TrialResult.

    Without the model's files, only loading (of random weights), training and saving can be
    rehearsed.
    """

    caching: CachingSettings
    max_seconds: float
    """Training takes no further step after this long."""
    scratch_folder: str | None = None
    """Folder to write in, which the parent removes, however the child ends; by default the
    system's."""

    def needs_another_step(self, seconds: list[float]) -> bool:
        """Whether the second half of the steps is not yet as fast as the first, and time is
        left."""
        if self._is_too_short_for_energy(seconds):
            return True
        in_time = sum(seconds) < self.max_seconds
        if len(seconds) < self.num_steps or (len(seconds) < MIN_REHEARSAL_STEPS and in_time):
            return True
        half = len(seconds) // 2
        first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
        return (
            abs(second - first) > MAX_DRIFT * first
            and len(seconds) < MAX_REHEARSAL_STEPS
            and in_time
        )


@dataclass(frozen=True)
class GradientRequest:
    """Compare a candidate's adapter gradients with the reference's. Gives their relative error,
    a float."""

    family: str
    config: Mapping[str, Any]
    """Constructor arguments of the tiny transformer."""
    workload: Workload
    """Its shapes should be small."""
    candidate: Candidate
    device: str
    reference_attention: str = "native"
    """Attention backend of the reference."""


@dataclass(frozen=True)
class UpdateRequest:
    """Compare the updates of a candidate's optimizer with the reference's. Gives their relative
    error, a float."""

    candidate: Candidate
    device: str


@dataclass(frozen=True)
class Failure:
    """How a request ended without a result."""

    outcome: Outcome
    message: str
    host_memory_bytes: int | None = None
    """Largest resident memory of the child; None if it did not live to say."""
    partial: Any = None
    """The last partial result that the child reported."""


@dataclass
class ChildState:
    """What lives as long as a child."""

    report: Callable[[Any], None] = lambda partial: None
    """Sends a partial result to the parent, which falls back on it should the child fail."""
    cache: dict[str, Any] = field(default_factory=dict)
    """What one request has built and the next ones use again, such as the loaded model."""
    is_capped: bool = False
    """Whether the limit on the child's memory is set."""
