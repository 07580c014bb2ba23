"""The candidates of a plan as its page shows them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.plan.candidate import Candidate, Choice
from autotune.plan.plan import TrainingPlan
from autotune.report.plan import process_workload

MAX_VALUES = 4
"""Values of a knob that are compared: of numbers of blocks there are many."""
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


@dataclass(frozen=True)
class Point:
    """A candidate of a plan as the chart of memory and speed shows it."""

    candidate: Candidate
    images_per_second: float
    run_memory_bytes: int
    kind: str
    """`measured`, `predicted`, `beyond` (predicted not to fit) or `failed` (in a trial)."""
    outcome: str
    is_chosen: bool = False
    is_front: bool = False

    @property
    def runs(self) -> bool:
        """True if it ran, or is predicted to."""
        return self.kind in ("measured", "predicted")


def points_of(plan: TrainingPlan) -> list[Point]:
    """Return every candidate of the plan, measured if a trial ran it, else predicted."""
    frozen, work = plan.frozen, process_workload(plan)
    batch = work.effective_batch_size
    expected, settings = frozen.expected, frozen.settings
    alternatives = frozen.forecast.alternatives if frozen.forecast else ()
    predicted = {each.candidate(settings): each for each in alternatives}
    found: dict[Candidate, Point] = {}

    def add(candidate: Candidate, seconds: float, size: int, kind: str, outcome: str) -> None:
        chosen = candidate == settings
        found[candidate] = Point(candidate, batch / seconds, size, kind, outcome, chosen)

    for candidate, each in predicted.items():
        size = each.run_memory_bytes
        if expected.phases:  # a rehearsal has measured what the process takes besides a step
            size = max(size, each.step_memory_bytes + expected.process_memory_bytes)
        fits = size <= frozen.hardware.budget_bytes
        outcome = "predicted to fit" if fits else "predicted not to fit"
        add(candidate, each.step_seconds, size, "predicted" if fits else "beyond", outcome)
    for trial in frozen.trials:
        seconds, peak = trial.median_step_seconds, trial.peak_memory_bytes
        if seconds and peak and trial.outcome == "ok":
            word = f"measured in a {'longer' if trial.confirms else 'short'} trial"
            size = peak + expected.process_memory_bytes
            add(trial.candidate, seconds, size, "measured", word)
        elif trial.candidate in predicted and trial.outcome != "ok":
            each = predicted[trial.candidate]
            word = f"tried: {OUTCOMES[trial.outcome]} (placed by its prediction)"
            add(trial.candidate, each.step_seconds, each.run_memory_bytes, "failed", word)
    kind = expected.evidence
    add(settings, expected.step_seconds, expected.run_memory_bytes, kind, f"chosen, {kind}")
    running = [point for point in found.values() if point.runs]
    least = math.inf
    for point in sorted(running, key=lambda p: (-p.images_per_second, p.run_memory_bytes)):
        if point.run_memory_bytes < least:
            least = point.run_memory_bytes
            found[point.candidate] = replace(point, is_front=True)
    return list(found.values())


def nearest_beyond(plan: TrainingPlan, points: Sequence[Point]) -> Point | None:
    """Find what is least over the budget: a failed trial, else a faster or any prediction."""
    trials = plan.frozen.trials
    tried = {trial.candidate for trial in trials if trial.outcome in ("oom", "spill")}
    failed = [point for point in points if point.kind == "failed" and point.candidate in tried]
    beyond = [point for point in points if point.kind == "beyond"]
    chosen = next(point for point in points if point.is_chosen)
    faster = [point for point in beyond if point.images_per_second > chosen.images_per_second]
    return min(failed or faster or beyond, key=lambda point: point.run_memory_bytes, default=None)


@dataclass(frozen=True)
class Worth:
    """The best that is known with another value of a knob."""

    knob: str
    value: str
    point: Point
    speed: float
    """Relative to the chosen settings by the same evidence, as is `memory_bytes`."""
    memory_bytes: int


def find_worths(plan: TrainingPlan, points: list[Point]) -> list[Worth]:
    """Compare the best candidate with each other value of a knob with the chosen settings.

    A trial counts before predictions, the fastest that fits before the smallest.
    """
    from autotune.knobs.registry import KNOBS

    frozen, work = plan.frozen, process_workload(plan)
    batch = work.effective_batch_size
    chosen = next(point for point in points if point.is_chosen)
    own = [t for t in frozen.trials if t.candidate == frozen.settings and t.outcome == "ok"]
    measured = batch / (own[0].median_step_seconds or frozen.expected.step_seconds) if own else None
    worths = []
    for knob in KNOBS:
        values = dict.fromkeys(getattr(point.candidate, knob.name) for point in points)
        for value in _other_values(list(values), getattr(frozen.settings, knob.name)):
            having = [point for point in points if getattr(point.candidate, knob.name) == value]
            running = [p for p in having if p.runs]
            best = max(
                [p for p in running if p.kind == "measured"] or running,
                key=lambda p: p.images_per_second,
                default=min(having, key=lambda p: p.run_memory_bytes),
            )
            reference = measured if best.kind == "measured" else None
            speed = best.images_per_second / (reference or chosen.images_per_second) - 1
            words = f"{knob.title}: {knob.describe(value, work)}"
            more = best.run_memory_bytes - chosen.run_memory_bytes
            worths.append(Worth(knob.name, words, best, speed, more))
    return sorted(worths, key=lambda worth: (not worth.point.runs, worth.speed))


def _other_values(values: list[Choice], current: Choice) -> list[Choice]:
    others = [value for value in values if value != current]
    if all(isinstance(value, int) for value in values) and len(others) > MAX_VALUES:
        below = sorted(int(value) for value in others if int(value) < int(current))
        above = sorted(int(value) for value in others if int(value) > int(current))
        return list(dict.fromkeys((*below[-1:], *above[:1], *below[:1], *above[-1:])))
    return others
