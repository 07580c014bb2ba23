"""One self-contained HTML page about plans and runs. Pure: objects in, text out.

All text is untrusted (names, prompts, reasons come from files): the templates escape it. Charts are
drawn by plotly, whose script is in the page once; `page.js` adds reading by keyboard, and the
colors of light and dark.
"""

import base64
import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from autotune.errors import InvalidInput
from autotune.events import StepFinished
from autotune.plan.candidate import Candidate
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.plan.workload import GOALS
from autotune.report import text
from autotune.report.candidates import OUTCOMES, Point, find_worths, nearest_beyond, points_of
from autotune.report.charts import (
    SHOWN_BUDGET,
    Part,
    Rule,
    axis,
    chart,
    line,
    marks,
    memory_unit,
    thinned,
)
from autotune.report.plan import describe_changes, process_workload, settings_items
from autotune.report.run import (
    gradient_lines,
    limit_text,
    phase_bytes,
    validation_lines,
    verdict_lines,
)
from autotune.report.text import change_text, loss_text, memory_text, seconds_text, smoothed

HICCUP = 3.0
"""How many times the median a step must take to be called a hiccup."""
MAX_SCALE = 2.5
"""How many times the largest phase the budget may be and still be on the scale."""
LEGEND = {  # later ones are drawn above
    "failed": "tried, did not run",
    "beyond": "predicted not to fit",
    "predicted": "predicted to fit, not tried",
    "measured": "measured here",
    "chosen": "chosen",
}
PHASE_TITLES = {"load": "loading", "cache": "caching", "train": "training", "preview": "previews"}
"""Phases of a prediction by the names that rehearsals have."""


@dataclass(frozen=True)
class Picture:
    """An image that was read, made small and encoded anew: what its file held besides is gone."""

    content: bytes
    kind: str
    """`png` or `jpeg`."""
    width: int
    height: int

    @property
    def source(self) -> str:
        """The `src` of an image whose bytes are in the page."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.content).decode()}"


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
class Subject:
    """A plan that a page shows, under the name that the user gave it."""

    name: str
    plan: TrainingPlan


@dataclass(frozen=True)
class RunSubject(Subject):
    """A run, finished or not, and its plan as it was run."""

    steps: Sequence[StepFinished] = ()
    report: RunReport | None = None
    previews: tuple[PreviewPicture, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be read, or was left out."""


def has_plotly() -> bool:
    """Return whether the extra `report` is installed."""
    return all(map(find_spec, ("plotly", "jinja2")))


def build_page(subjects: Sequence[Subject], autotune_version: str) -> str:
    """Write a page as HTML: its policy admits no script but its own, and no request.

    Raises:
        InvalidInput: the extra `report` is not installed.
    """
    if not has_plotly():
        hint = "install it: pip install 'lora-autotune[report]'"
        raise InvalidInput("charts are drawn by plotly, which is not installed", hint=hint)
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    templates = _templates()
    script = f"{get_plotlyjs()}\n{templates.get_template('page.js').render()}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    views = [
        {"plan": _plan_view(each), "run": _run_view(each) if isinstance(each, RunSubject) else None}
        for each in subjects
    ]
    page: str = templates.get_template("report.html").render(
        views=views, version=autotune_version, script=Markup(script), digest=Markup(digest)
    )
    return page


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> str:
        return value if isinstance(value, Markup) else text.printable_lines(str(value))

    def difference(promised: float, measured: float | None, digits: int = 1) -> str:
        return change_text(measured / promised - 1, digits) if measured and promised else "-"

    templates = Environment(
        loader=PackageLoader("autotune.report"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {
        "memory": memory_text,
        "seconds": seconds_text,
        "uncertainty": text.plus_minus,
        "loss": loss_text,
        "rate": "{:.3g}".format,
        "percent": "{:+.0%}".format,
        "time_left": text.time_left_text,
        "difference": difference,
        "outcomes": OUTCOMES,
    }
    return templates


def _plan_view(subject: Subject) -> dict[str, Any]:
    from autotune.knobs.registry import TITLES

    plan, frozen, points = subject.plan, subject.plan.frozen, points_of(subject.plan)
    work = process_workload(plan)
    expected, forecast = frozen.expected, frozen.forecast
    chosen = next(point for point in points if point.is_chosen)
    alternatives = forecast.alternatives if forecast else ()

    def named(candidate: Candidate) -> str:
        return describe_changes(candidate, frozen.settings) or "the chosen settings"

    measured = phase_bytes(expected.phases, expected.process_memory_bytes)
    phases = () if measured or not forecast else forecast.phases
    promised = {PHASE_TITLES.get(each.name, each.name): each.run_memory_bytes for each in phases}
    return {
        "subject": subject,
        "frozen": frozen,
        "work": work,
        "goal": GOALS[work.objective],
        "num_tried": sum(not trial.confirms for trial in frozen.trials),
        "is_tie": any(
            point.images_per_second > chosen.images_per_second and point.kind == chosen.kind
            for point in points
        ),
        "nearest": nearest_beyond(plan, points),
        "points": sorted(points, key=lambda point: -point.images_per_second),
        "chart": _scatter(points, named, frozen.hardware.budget_bytes),
        "phases": _bars(plan, measured, promised),
        "worths": find_worths(plan, points),
        "predicted": {each.candidate(frozen.settings): each for each in alternatives},
        "named": named,
        "settings": settings_items(frozen.settings, work),
        "titles": TITLES,
    }


def _scatter(points: Sequence[Point], named: Callable[[Candidate], str], budget: int) -> Part:
    is_near = budget <= SHOWN_BUDGET * max(point.run_memory_bytes for point in points)
    unit, suffix = memory_unit([point.run_memory_bytes for point in points])

    def read(point: Point) -> tuple[float, float, str]:
        front = ", on the Pareto front" if point.is_front else ""
        like = "" if point.is_chosen else "like the chosen, but "
        tip = (
            f"{point.images_per_second:.3g} images/s with {memory_text(point.run_memory_bytes)}: "
            f"{point.outcome}{front}. Settings: {like}{named(point.candidate)}."
        )
        return point.run_memory_bytes / unit, point.images_per_second, tip

    front = line("front", sorted(read(point)[:2] for point in points if point.is_front))
    traces = [{**front, "name": "Pareto front"}]
    for kind, words in LEGEND.items():
        own = [p for p in points if (p.is_chosen if kind == "chosen" else p.kind == kind)]
        traces += [marks(kind, list(map(read, own)), words)] if own else []
    beyond = "" if is_near else f" The budget, {memory_text(budget)}, is far beyond the right end."
    means = "up is faster, left needs less memory, and nothing beats the Pareto front in both"
    memory = [point.run_memory_bytes / unit for point in points]
    return chart(
        f"Each mark is one set of settings: {means}.{beyond}",
        traces,
        axis("run memory, in its neediest phase", memory, suffix=suffix),
        axis("speed in images/s", [point.images_per_second for point in points]),
        [("x", budget / unit, f"budget {memory_text(budget)}")] if is_near else (),
    )


def _bars(plan: TrainingPlan, measured: dict[str, int], promised: dict[str, int]) -> Part:
    budget = plan.frozen.hardware.budget_bytes
    if not measured and not promised:
        promised = {"neediest phase": plan.frozen.expected.run_memory_bytes}
    largest = max(1, *measured.values(), *promised.values())
    is_near = budget <= MAX_SCALE * largest
    scale = 1.05 * max(largest, budget if is_near else 0) / 100
    styles = (("bar", promised), ("bar solid", measured))
    rows = [
        (name, [(style, sizes[name]) for style, sizes in styles if name in sizes])
        for name in dict.fromkeys((*measured, *promised))
    ]
    is_pair = bool(measured and promised)
    pair = "Hollow: promised; solid: measured. " * is_pair
    where = "The dashed line is" if is_near else "Far beyond the scale:"
    caption = f"{pair}{where} the budget, {memory_text(budget)}."
    limit = f"{budget / scale:.1f}" if is_near else ""
    return {"rows": rows, "scale": scale, "is_pair": is_pair, "limit": limit, "caption": caption}


def _run_view(subject: RunSubject) -> dict[str, Any]:
    steps, report, plan = subject.steps, subject.report, subject.plan
    expected, prompts = plan.frozen.expected, plan.job.preview_prompts
    view: dict[str, Any] = {"subject": subject, "report": report, "expected": expected}
    if steps:
        measured = report.measured_step_seconds if report else statistics.median(_seconds(steps))
        waits = statistics.fmean(step.data_seconds for step in steps[2:] or steps)
        view |= {
            "loss": smoothed([step.loss for step in steps])[-1],
            "step_seconds": measured,
            "limit": limit_text(plan, measured, waits),
        }
    view["verdict"] = []
    if report and report.verdict:
        view["verdict"] = [*verdict_lines(report.verdict), *gradient_lines(report)]
        view["verdict"] += validation_lines(report.validation) if report.validation else []
    if report:
        own = expected.process_memory_bytes
        both = (phase_bytes(each, own) for each in (report.phases, report.expected_phases))
        view["phases"] = _bars(plan, *both)
    view["charts"] = _run_charts(subject) if len(steps) > 1 else []
    previews = sorted(subject.previews, key=lambda each: (each.number, each.step))
    view["previews"] = [
        (prompts[number] if number < len(prompts) else f"prompt {number + 1}", list(pictures))
        for number, pictures in groupby(previews, lambda each: each.number)
    ]
    return view


def _seconds(steps: Sequence[StepFinished]) -> list[float]:
    return [step.seconds for step in steps[2:] or steps]  # the first ones warm up


def _run_charts(subject: RunSubject) -> list[tuple[str, Part]]:
    steps, frozen = subject.steps, subject.plan.frozen
    numbers, losses = [float(step.step) for step in steps], [step.loss for step in steps]
    smooth = thinned(list(zip(numbers, smoothed(losses), strict=True)))
    lines = [
        line("raw", thinned(list(zip(numbers, losses, strict=True)))),
        line("smooth", smooth, lambda loss: f"smoothed loss {loss_text(loss)}"),
    ]
    title = "Loss of each step (thin) and smoothed (thick)."
    charts = [("Loss", chart(title, lines, axis("step"), axis("loss", losses)))]
    if held_out := _held_out(steps):
        charts.append(("Held-out images", held_out))

    planned, median = frozen.expected.step_seconds, statistics.median(_seconds(steps))
    hiccups = [step.seconds - median for step in steps if step.seconds > HICCUP * median]
    number = f"{len(hiccups)} hiccup{'s' * (len(hiccups) != 1)}"
    slow = f"{number} (over {HICCUP:.0f} times the median of {seconds_text(median)})"
    cost = f", {seconds_text(sum(hiccups))} lost to them" if hiccups else ""
    seconds = thinned([(float(step.step), step.seconds) for step in steps], max)
    times = chart(
        f"Seconds of each step, the slowest of neighbors. {slow}{cost}.",
        [line("smooth", seconds, lambda s: f"{seconds_text(s)}, {s / planned:.3g} times the plan")],
        axis("step"),
        axis("seconds", suffix=" s", from_zero=True),
        [("y", planned, f"planned {seconds_text(planned)}")],
    )

    promise, budget = frozen.expected.run_memory_bytes, frozen.hardware.budget_bytes
    sizes = [step.memory_bytes for step in steps]
    unit, suffix = memory_unit([promise, *sizes])
    rules: list[Rule] = [("y", promise / unit, f"promised {memory_text(promise)}")]
    far = f" The budget, {memory_text(budget)}, is far above."
    if budget <= SHOWN_BUDGET * max(promise, *sizes):
        rules, far = [*rules, ("y", budget / unit, f"budget {memory_text(budget)}")], ""
    held = thinned([(float(step.step), step.memory_bytes / unit) for step in steps], max)
    memory = chart(
        f"Memory that is held between steps, and what is promised for the whole run.{far}",
        [line("smooth", held, lambda size: f"{memory_text(size * unit)} held")],
        axis("step"),
        axis("memory", suffix=suffix),
        rules,
    )
    return [*charts, ("Step time", times), ("Memory", memory)]


def _held_out(steps: Sequence[StepFinished]) -> Part | None:
    points = [(float(s.step), s.validation_loss) for s in steps if s.validation_loss is not None]
    bases = [s.base_validation_loss for s in steps if s.base_validation_loss is not None]
    if not points or not bases:
        return None
    base, lowest = bases[-1], min(points, key=lambda point: point[1])
    read = []
    for at, loss in sorted({*thinned(points), lowest}):
        change = change_text(loss / base - 1, 1) if base > 0 else "-"
        read.append((at, loss, f"after step {at:.0f}: {loss_text(loss)}, {change}"))
    best = f"lowest {loss_text(lowest[1])} after step {lowest[0]:.0f}"
    lines = [
        line("smooth", [point[:2] for point in read]),
        marks("measured", [point for point in read if point[:2] != lowest]),
        marks("chosen", [point for point in read if point[:2] == lowest]),
    ]
    y = axis("loss", [base, *(loss for _, loss, _ in read)])
    rule: Rule = ("y", base, f"without the adapter {loss_text(base)}")
    return chart(f"Loss on images that never train: {best}.", lines, axis("step"), y, [rule])
