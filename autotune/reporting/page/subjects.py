"""What a page shows: a plan, a shared record or a run, each as far as its files hold it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.schema import (
    Candidate,
    Expected,
    Forecast,
    Reason,
    Residual,
    RunReport,
    StepFinished,
    TrainingPlan,
    TrialResult,
    Workload,
)


@dataclass(frozen=True)
class PlanSubject:
    """A plan, or a record, which holds less."""

    name: str
    """What the user called it."""
    kind: str
    """`plan` or `record`."""
    device_name: str
    num_processes: int
    budget_bytes: int
    workload: Workload
    """The work of one process."""
    settings: Candidate
    expected: Expected
    trials: tuple[TrialResult, ...]
    forecast: Forecast | None = None
    reasons: tuple[Reason, ...] = ()
    advice: tuple[str, ...] = ()
    residuals: tuple[Residual | None, ...] = ()
    """For each trial, how far it was from its prediction: records keep that instead of
    predictions.
    """
    search_seconds: float = 0.0
    plan: TrainingPlan | None = None

    @classmethod
    def of_plan(cls, name: str, plan: TrainingPlan) -> "PlanSubject":
        frozen, number = plan.frozen, plan.frozen.hardware.num_processes
        return cls(
            name=name,
            kind="plan",
            device_name=frozen.hardware.device_name,
            num_processes=number,
            budget_bytes=frozen.hardware.budget_bytes,
            workload=frozen.workload.share(number),
            settings=frozen.settings,
            expected=frozen.expected,
            trials=frozen.trials,
            forecast=frozen.forecast,
            reasons=frozen.reasons,
            advice=(*([frozen.overheads.text] if frozen.overheads else ()), *frozen.advice),
            search_seconds=frozen.search_seconds,
            plan=plan,
        )

    @property
    def is_measured(self) -> bool:
        return self.expected.evidence == "measured"


@dataclass(frozen=True)
class Picture:
    """An image that was read, made small and encoded anew: what its file held besides is gone."""

    content: bytes
    kind: str
    """`png` or `jpeg`."""
    width: int
    height: int


@dataclass(frozen=True)
class PreviewPicture:
    """A preview of a run."""

    step: int
    number: int
    """Which of the job's prompts it shows."""
    picture: Picture


@dataclass(frozen=True)
class Comparison:
    """The same prompt and noise without and with the adapter."""

    label: str
    without: Picture
    with_adapter: Picture


@dataclass(frozen=True)
class RunSubject:
    """A run, finished or not."""

    name: str
    plan: TrainingPlan
    """As it was run."""
    steps: Sequence[StepFinished]
    report: RunReport | None
    """None until the run has ended."""
    previews: tuple[PreviewPicture, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be read, or was left out."""


Subject = PlanSubject | RunSubject


@dataclass(frozen=True)
class Point:
    """A candidate of a plan as the chart of memory and speed shows it."""

    candidate: Candidate
    images_per_second: float
    run_memory_bytes: int
    kind: str
    """`measured`, `predicted`, `beyond` (predicted not to fit) or `failed` (a trial that did not
    run).
    """
    outcome: str
    """In words."""
    is_chosen: bool = False
    is_front: bool = False


def points_of(subject: PlanSubject) -> list[Point]:
    """Every candidate that the plan or record tells of: as measured if a trial ran it, else as
    predicted.
    """
    batch, expected, settings = (
        subject.workload.effective_batch_size,
        subject.expected,
        subject.settings,
    )
    alternatives = subject.forecast.alternatives if subject.forecast else ()
    predicted = {each.candidate(settings): each for each in alternatives}
    found: dict[Candidate, Point] = {}
    for candidate, each in predicted.items():
        run_bytes = each.run_memory_bytes
        if expected.phases:  # a rehearsal has measured what the process takes besides a step
            run_bytes = max(run_bytes, each.step_memory_bytes + expected.process_memory_bytes)
        fits = run_bytes <= subject.budget_bytes
        outcome = "predicted to fit" if fits else "predicted not to fit"
        kind = "predicted" if fits else "beyond"
        found[candidate] = Point(candidate, batch / each.step_seconds, run_bytes, kind, outcome)
    for trial in subject.trials:
        if (
            (seconds := trial.median_step_seconds)
            and trial.outcome == "ok"
            and trial.peak_memory_bytes
        ):
            run_bytes = trial.peak_memory_bytes + expected.process_memory_bytes
            word = "measured in a longer trial" if trial.confirms else "measured in a short trial"
            found[trial.candidate] = Point(
                trial.candidate, batch / seconds, run_bytes, "measured", word
            )
        elif trial.candidate in predicted and trial.outcome != "ok":
            each = predicted[trial.candidate]
            word = f"tried: {OUTCOMES[trial.outcome]} (placed by its prediction)"
            speed, run_bytes = batch / each.step_seconds, each.run_memory_bytes
            found[trial.candidate] = Point(trial.candidate, speed, run_bytes, "failed", word)
    speed, kind = batch / expected.step_seconds, expected.evidence
    found[settings] = Point(
        settings, speed, expected.run_memory_bytes, kind, f"chosen, {kind}", is_chosen=True
    )
    return _with_front(list(found.values()))


OUTCOMES = {
    "ok": "ran",
    "oom": "ran out of memory",
    "host_oom": "ran out of the host's memory",
    "spill": "spilled into host memory",
    "timeout": "took too long",
    "unsupported": "is not supported here",
    "numerics": "computed wrong numbers",
    "crash": "crashed",
    "unpaid": "takes longer to start than it saves",
}


def _with_front(points: list[Point]) -> list[Point]:
    """The same points, those that no other beats in both memory and speed marked."""
    running = [point for point in points if point.kind in ("measured", "predicted")]
    front, least = set(), math.inf
    for point in sorted(running, key=lambda p: (-p.images_per_second, p.run_memory_bytes)):
        if point.run_memory_bytes < least:
            least = point.run_memory_bytes
            front.add(point.candidate)
    return [replace(point, is_front=point.candidate in front) for point in points]


def nearest_beyond(subject: PlanSubject, points: Sequence[Point]) -> Point | None:
    """What would run out of memory with the least over the budget: a trial that did, if there is
    one, else predicted; of predictions first one that would be faster than what was chosen."""
    tried = {trial.candidate for trial in subject.trials if trial.outcome in ("oom", "spill")}
    failed = [point for point in points if point.kind == "failed" and point.candidate in tried]
    beyond = [point for point in points if point.kind == "beyond"]
    chosen = next(point for point in points if point.is_chosen)
    faster = [point for point in beyond if point.images_per_second > chosen.images_per_second]
    return min(failed or faster or beyond, key=lambda point: point.run_memory_bytes, default=None)
