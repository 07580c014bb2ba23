"""Candidates of a plan, measured or predicted, as points of a chart: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.plan.candidate import Choice, counting_trials, nearest_numbers
from autotune.plan.plan import TrainingPlan
from autotune.plan.words import OUTCOMES, TITLES, setting_text

MAX_VALUES = 4  # of a knob that are compared: of numbers of blocks there are many
Changes = Mapping[str, Choice]  # differences from the chosen settings, by knob


@dataclass(frozen=True)
class Point:
    """A candidate of a plan as the chart of memory and speed shows it."""

    changes: Changes
    name: str  # the same in words
    images_per_second: float
    run_memory_bytes: int
    kind: str  # `measured`, `predicted`, `beyond` (predicted not to fit) or `failed` (in a trial)
    outcome: str
    is_front: bool = False

    @property
    def is_chosen(self) -> bool:
        return not self.changes

    @property
    def runs(self) -> bool:
        """True if it ran, or is predicted to."""
        return self.kind in ("measured", "predicted")


def name_of(changes: Changes) -> str:
    """Put what differs from the chosen settings in words."""
    told = (setting_text(name, changes[name]) for name in TITLES if name in changes)
    return ", ".join(told) or "the chosen settings"


def points_of(plan: TrainingPlan) -> list[Point]:
    """Return every candidate of the plan, measured if a trial ran it, else predicted."""
    frozen, batch = plan.frozen, plan.frozen.process_workload.effective_batch_size
    expected, settings = frozen.expected, frozen.settings
    alternatives = frozen.forecast.alternatives if frozen.forecast else ()
    predicted = {name_of(each.changes): each for each in alternatives}
    found: dict[str, Point] = {}

    def add(changes: Changes, seconds: float, size: int, kind: str, outcome: str) -> None:
        name = name_of(changes)
        found[name] = Point(changes, name, batch / seconds, size, kind, outcome)

    for each in alternatives:
        size = each.run_memory_bytes
        if expected.phases:  # a rehearsal has measured what the process takes besides a step
            size = max(size, each.step_memory_bytes + expected.process_memory_bytes)
        fits = size <= frozen.hardware.budget_bytes
        outcome = "predicted to fit" if fits else "predicted not to fit"
        add(each.changes, each.step_seconds, size, "predicted" if fits else "beyond", outcome)
    for trial in counting_trials(frozen.trials):
        seconds, peak = trial.median_step_seconds, trial.peak_memory_bytes
        changes = trial.candidate.differences(settings)
        if seconds and peak and trial.outcome == "ok":
            word = f"measured in a {'longer' if trial.confirms else 'short'} trial"
            size = peak + expected.process_memory_bytes
            add(changes, seconds, size, "measured", word)
        elif trial.outcome != "ok" and (like := predicted.get(name_of(changes))):
            word = f"tried: {OUTCOMES[trial.outcome]} (placed by its prediction)"
            add(changes, like.step_seconds, like.run_memory_bytes, "failed", word)
    kind = expected.evidence
    add({}, expected.step_seconds, expected.run_memory_bytes, kind, f"chosen, {kind}")
    least = float("inf")
    for point in sorted(found.values(), key=lambda p: (-p.images_per_second, p.run_memory_bytes)):
        if point.runs and point.run_memory_bytes < least:
            least = point.run_memory_bytes
            found[point.name] = replace(point, is_front=True)
    return list(found.values())


def nearest_beyond(plan: TrainingPlan, points: Sequence[Point]) -> Point | None:
    """Find the candidate least over the budget: a failed trial, a faster prediction, or any."""
    settings, trials = plan.frozen.settings, plan.frozen.trials
    tried = [t.candidate.differences(settings) for t in trials if t.outcome in ("oom", "spill")]
    failed = [point for point in points if point.kind == "failed" and point.changes in tried]
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
    speed: float  # relative to the chosen settings by the same evidence
    memory_bytes: int  # more than the chosen settings need


def find_worths(plan: TrainingPlan, points: list[Point]) -> list[Worth]:
    """Compare the best candidate with each other value of a knob with the chosen settings."""
    frozen, work = plan.frozen, plan.frozen.process_workload
    chosen = next(point for point in points if point.is_chosen)
    own = [t for t in frozen.trials if t.candidate == frozen.settings and t.outcome == "ok"]
    measured = chosen.images_per_second
    if own:
        seconds = own[0].median_step_seconds or frozen.expected.step_seconds
        measured = work.effective_batch_size / seconds
    worths = []
    varied = {name for point in points for name in point.changes}
    for knob in filter(varied.__contains__, TITLES):
        own_value = getattr(frozen.settings, knob)
        values = [point.changes.get(knob, own_value) for point in points]
        others = [value for value in dict.fromkeys(values) if value != own_value]
        if len(others) > MAX_VALUES and all(isinstance(value, int) for value in values):
            others = [*nearest_numbers(others, own_value)]
        for value in others:
            having = [p for p, its in zip(points, values, strict=True) if its == value]
            running = [p for p in having if p.runs]
            best = max(
                [p for p in running if p.kind == "measured"] or running,
                key=lambda p: p.images_per_second,
                default=min(having, key=lambda p: p.run_memory_bytes),
            )
            reference = measured if best.kind == "measured" else chosen.images_per_second
            speed = best.images_per_second / reference - 1
            words = setting_text(knob, value, work.model.num_blocks)
            more = best.run_memory_bytes - chosen.run_memory_bytes
            worths.append(Worth(knob, words, best, speed, more))
    return sorted(worths, key=lambda worth: (not worth.point.runs, worth.speed))
