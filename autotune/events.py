"""Events of long work: one typed stream, which terminals, JSON lines and pages read.

Every function that takes long calls its `on_event` with them; nothing depends on what it does.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from autotune.plan import base
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Workload

SMOOTHING = 0.05  # share of each new loss in the smoothed one, once there are enough of them


class Event(base.Frozen):
    """Base of everything that long work tells."""

    @property
    def logged(self) -> tuple[int, str]:
        """The level of `logging` and the line with which it is logged."""
        if isinstance(self, Notice):
            return logging.WARNING if self.level == "warning" else logging.INFO, self.text
        if isinstance(self, PhaseStarted):
            return logging.INFO, self.name
        return logging.DEBUG, event_line(self)


class PhaseStarted(Event):
    """A phase of the work has begun; it lasts until the next one."""

    name: str
    """Name for people to read, e.g. `loading the transformer`."""


class StatusChanged(Event):
    """A detail of the current phase: worth a spinner's text, not a line."""

    text: str


class Progressed(Event):
    """Progress of a phase with a known number of items."""

    name: str
    done: int
    total: int


class Notice(Event):
    """A sentence that the user should read."""

    text: str
    topic: str = "note"
    """Its subject: `note`, or `records` for shared records."""
    level: Literal["note", "warning"] = "note"


class SearchSpaceBuilt(Event):
    """The workload is known, and what may be tried for it."""

    workload: Workload
    num_candidates: int
    max_trials: int = 0
    """The most trials that the search may run; 0 if it runs none."""


class RecordsMatched(Event):
    """Earlier measurements that a search starts from."""

    kind: Literal["exact", "near", "none"]
    """Match of the best record."""
    num_records: int
    refused: tuple[str, ...] = ()
    """Why records cannot be used at all, one sentence each."""


class RunStarted(Event):
    """A training run begins."""

    plan: TrainingPlan
    """The plan that is trained: measured, if a trial could measure it."""


class TrialStarted(Event):
    """A candidate is being tried."""

    candidate: Candidate


class TrialFinished(Event):
    """A trial has ended, well or not."""

    result: TrialResult


class StepFinished(Event):
    """One optimizer step of a training run: a line of `metrics.jsonl`."""

    step: int
    """Number of the step, counted from 1."""
    num_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float | None = None
    """Norm of the gradient before clipping; None if it overflowed fp16 and was skipped."""
    seconds: float
    """Wall time of the whole step."""
    data_seconds: float
    """Part of `seconds` that was spent waiting for data."""
    images_per_second: float
    memory_bytes: int
    """Memory that the process holds between steps."""
    reserved_bytes: int | None = None
    """Memory that the GPU's allocator holds, for tensors or in reserve."""
    allocator_retries: int | None = None
    """Times so far that the allocator ran out of memory and started over."""
    epoch: int | None = None
    """Epoch that the step begins in, counted from 1."""
    gpu_utilization: float | None = None
    """Share of time that the GPU computed, in [0, 1]; None without NVML."""
    gradient_spikes: int = 0
    """Gradients of the run so far whose norm was far above those of the steps before."""
    nonfinite_gradients: int = 0
    """Gradients of the run so far that were not finite; their steps were taken again."""
    overflowed_gradients: int = 0
    """Gradients so far that overflowed fp16: their steps were skipped, and the scale fell."""
    loss_scale: float | None = None
    """Factor of the next step's losses, in fp16."""
    validation_loss: float | None = None
    """Mean loss on held-out images after the step; None if it was not measured."""
    base_validation_loss: float | None = None
    """The same without the adapter."""
    remaining_seconds: float | None = None
    """Time until the last step, previews and checkpoints included; None after a start's first."""


class PreviewsWritten(Event):
    """Previews of a training run lie in its output folder."""

    step: int
    """Number of steps that had been taken."""


OnEvent = Callable[[Event], None]  # a listener to the stream


def smooth(before: float, value: float, number: int) -> float:
    """Return the moving average after the `number`-th value, counted from 1."""
    share = max(SMOOTHING, 1 / number)
    return (1 - share) * before + share * value


def smoothed(values: Iterable[float]) -> list[float]:
    """Return the moving average after each value."""
    series: list[float] = []
    for number, value in enumerate(values, 1):
        series.append(smooth(series[-1] if series else 0.0, value, number))
    return series


def loss_change(losses: Sequence[float]) -> tuple[float, float]:
    """Return the smoothed loss after a run's first tenth, and after its last step."""
    series = smoothed(losses) or [0.0]
    return series[max(0, len(series) // 10 - 1)], series[-1]


def ignore_event(event: Event) -> None:
    """Ignore an event."""


def event_line(event: Event) -> str:
    """Write the event as one line of JSON, with the name of its class as `event`."""
    return json.dumps({"event": type(event).__name__, **event.model_dump(mode="json")})
