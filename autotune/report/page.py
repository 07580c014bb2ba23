"""One self-contained HTML page about plans and runs: objects in, text out, all of it escaped.

Charts are figures of plotly in plain dictionaries, whose colors name those of the style sheet, such
as `--blue`: `page.js` draws them, in light or dark, and has them read by keyboard.
"""

import base64
import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import quote

from autotune.errors import InvalidInput
from autotune.events import loss_change, smoothed
from autotune.plan import candidate, prediction, words, workload
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.report import text
from autotune.report.plan import job_text, settings_items
from autotune.report.points import Point, find_worths, name_of, nearest_beyond, points_of
from autotune.report.run import adapter_lines, limit_text, missed_promises, phase_bytes
from autotune.report.text import change_text, loss_text, memory_text, seconds_text
from autotune.train.metrics import Steps

WIDE_RATIO = 8.0  # largest over smallest value from which an axis is logarithmic
SHOWN_BUDGET = 2.5  # times what is shown: a larger budget is not on the scale
MAX_POINTS = 300  # of a line: as many as a screen shows
Part = dict[str, Any]  # an axis, a trace, a shape or a figure
Reading = tuple[float, float, str]  # a point, and what is read of it
Rule = tuple[str, float, str]  # `x` or `y`, where a line across stands, and its label
HICCUP = 3.0  # times the median step
LEGEND = {  # later ones are drawn above
    "failed": "tried, did not run",
    "beyond": "predicted not to fit",
    "predicted": "predicted to fit, not tried",
    "measured": "measured here",
    "chosen": "chosen",
}


def _marker(symbol: str, size: int, color: str) -> Part:
    marker = {"symbol": symbol, "size": size, "color": color, "line": {"width": 2}}
    return {"mode": "markers", "marker": marker}


LOOKS: dict[str, Part] = {  # they differ without color, too
    "predicted": _marker("circle-open", 10, "--blue"),
    "measured": _marker("circle", 11, "--blue"),
    "beyond": _marker("x-thin-open", 8, "--gray"),
    "failed": _marker("square-x-open", 12, "--gray"),
    "chosen": _marker("diamond-open", 20, "--orange"),
    "smooth": {"mode": "lines", "line": {"color": "--blue", "width": 2}},
    "raw": {"mode": "lines", "line": {"color": "--raw", "width": 1}},
    "front": {
        "mode": "lines",
        "line": {"color": "--gray", "width": 1.2, "dash": "dot", "shape": "hv"},
    },
}
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "--text"}
_LAYOUT = {
    "font": _FONT,
    "paper_bgcolor": "--back",
    "plot_bgcolor": "--back",
    "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--text", "font": _FONT, "align": "left"},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
    "margin": dict.fromkeys("lrtb", 10),
    "uirevision": True,
}


class Picture(NamedTuple):
    """An image that was read, made small and encoded anew: what its file held besides is gone."""

    source: str  # a `data:` address
    width: int
    height: int


Preview = tuple[int, int, Picture]  # which prompt, after which step


@dataclass(frozen=True)
class Subject:
    """A plan under the name that the user gave it, or a run, finished or not, with its plan."""

    name: str
    plan: TrainingPlan
    is_run: bool = False
    steps: Steps = field(default_factory=Steps)
    report: RunReport | None = None
    previews: Sequence[Preview] = ()
    comparisons: Sequence[tuple[str, Picture, Picture]] = ()  # a prompt without, with
    notes: Sequence[str] = ()  # what could not be read, or was left out


def has_plotly() -> bool:
    """Return whether the extra `report` is installed."""
    return all(map(find_spec, ("plotly", "jinja2")))


def make_templates() -> Any:
    """Return jinja's environment for the report and the served page; what is shown is text,
    escaped, without control characters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    templates = Environment(
        loader=PackageLoader("autotune.report"),
        autoescape=True,
        finalize=lambda value: (
            value if isinstance(value, Markup) else text.printable_lines(str(value))
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["urlencode"] = lambda name: quote(os.fsencode(name))  # of any bytes
    templates.globals |= {
        "memory": memory_text,
        "seconds": seconds_text,
        "range": text.range_text,
        "time_evidence": prediction.TIME_EVIDENCE,
        "rough": text.rough_seconds,
        "loss": loss_text,
        "rate": "{:.3g}".format,
        "percent": "{:+.0%}".format,
        "time_left": text.time_left_text,
        "difference": lambda promised, measured, digits=1: (
            change_text(measured / promised - 1, digits) if measured and promised else "-"
        ),
        "outcomes": words.OUTCOMES,
    }
    return templates


def build_page(subjects: Sequence[Subject], autotune_version: str) -> list[bytes]:
    """Write a page that admits no script but its own, and no request, in parts: plotly is nearly
    all of it, and each copy as text took 9.6 MB of a run's memory. Raises InvalidInput."""
    if not has_plotly():
        hint = "install it: pip install 'lora-autotune[report]'"
        raise InvalidInput("charts are drawn by plotly, which is not installed", hint=hint)
    templates = make_templates()
    plotly = (files("plotly") / "package_data/plotly.min.js").read_bytes()
    own = f"\n{templates.get_template('page.js').render()}".encode()
    digest = hashlib.sha256(plotly)
    digest.update(own)
    encoded = base64.b64encode(digest.digest()).decode()
    views = [(plan_view(each), run_view(each) if each.is_run else None) for each in subjects]
    page = templates.get_template("report.html").render(
        views=views, version=autotune_version, digest=encoded
    )
    before, tag, after = page.partition("<script>")
    return [f"{before}{tag}".encode(), plotly, own, after.encode()]


def plan_view(subject: Subject) -> dict[str, Any]:
    """Gather what a page shows of a plan."""
    plan, frozen, points = subject.plan, subject.plan.frozen, points_of(subject.plan)
    expected, forecast = frozen.expected, frozen.forecast
    chosen = next(point for point in points if point.is_chosen)
    alternatives = forecast.alternatives if forecast else ()
    predicted = {name_of(each.changes): each for each in alternatives}
    names = [name_of(trial.candidate.differences(frozen.settings)) for trial in frozen.trials]
    measured = phase_bytes(expected.phases, expected.process_memory_bytes)
    phases = () if measured or not forecast else forecast.phases
    promised = {words.PHASES.get(each.name, each.name): each.run_memory_bytes for each in phases}
    like = [point for point in points if point.kind == chosen.kind]
    return {
        "subject": subject,
        "frozen": frozen,
        "run": job_text(plan),
        "work": frozen.process_workload,
        "goal": workload.GOALS[frozen.workload.objective],
        "num_tried": len({trial.candidate for trial in frozen.trials}),
        "is_tie": any(point.images_per_second > chosen.images_per_second for point in like),
        "nearest": nearest_beyond(plan, points),
        "points": sorted(points, key=lambda point: -point.images_per_second),
        "chart": _scatter(points, frozen.hardware.budget_bytes),
        "phases": _bars(plan, measured, promised),
        "worths": find_worths(plan, points),
        "trials": list(zip(frozen.trials, names, map(predicted.get, names), strict=True)),
        "settings": settings_items(plan),
        "titles": words.TITLES,
    }


def _scatter(points: Sequence[Point], budget: int) -> Part:
    is_near = budget <= SHOWN_BUDGET * max(point.run_memory_bytes for point in points)
    unit, suffix = _memory_unit([point.run_memory_bytes for point in points])

    def read(point: Point) -> Reading:
        front = ", on the Pareto front" if point.is_front else ""
        like = "" if point.is_chosen else "like the chosen, but "
        tip = (
            f"{point.images_per_second:.3g} images/s with {memory_text(point.run_memory_bytes)}: "
            f"{point.outcome}{front}. Settings: {like}{point.name}."
        )
        return point.run_memory_bytes / unit, point.images_per_second, tip

    front = sorted((*read(point)[:2], "") for point in points if point.is_front)
    traces = [_trace("front", front, "Pareto front")]
    for kind, label in LEGEND.items():
        own = [p for p in points if (p.is_chosen if kind == "chosen" else p.kind == kind)]
        traces += [_trace(kind, list(map(read, own)), label)] if own else []
    beyond = "" if is_near else f" The budget, {memory_text(budget)}, is far beyond the right end."
    means = "up is faster, left needs less memory, and nothing beats the Pareto front in both"
    memory = [point.run_memory_bytes / unit for point in points]
    return _chart(
        f"Each mark is one set of settings: {means}.{beyond}",
        traces,
        _axis("run memory, in its neediest phase", memory, suffix=suffix),
        _axis("speed in images/s", [point.images_per_second for point in points]),
        [("x", budget / unit, f"budget {memory_text(budget)}")] if is_near else (),
    )


def trials_chart(trials: Sequence[candidate.TrialResult], batch: int) -> Part | None:
    """Chart the trials of a search that is still going on; None before the first has run."""
    ran = [
        (trial.peak_memory_bytes, batch / seconds, trial)
        for trial in trials
        if (seconds := trial.median_step_seconds) and trial.peak_memory_bytes
    ]
    if not ran:
        return None
    unit, suffix = _memory_unit([size for size, _, _ in ran])
    points = []
    for size, speed, trial in ran:
        name = name_of(trial.candidate.differences(ran[0][2].candidate))
        tip = f"{speed:.3g} images/s with {memory_text(size)}: {name}."
        points.append((size / unit, speed, tip))
    best = [max(points, key=lambda point: point[1])]
    traces = [_trace("measured", points, "tried"), _trace("chosen", best, "fastest so far")]
    x = _axis("step memory", [point[0] for point in points], suffix=suffix)
    title = "Each mark is a trial on this machine: up is faster, left needs less memory."
    return _chart(title, traces, x, _axis("speed in images/s", [point[1] for point in points]))


def _bars(plan: TrainingPlan, measured: dict[str, int], promised: dict[str, int]) -> Part:
    budget = plan.frozen.hardware.budget_bytes
    if not measured and not promised:
        promised = {"neediest phase": plan.frozen.expected.run_memory_bytes}
    largest = max(1, *measured.values(), *promised.values())
    is_near = budget <= SHOWN_BUDGET * largest
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


def run_view(subject: Subject) -> dict[str, Any]:
    """Gather what a page shows of a run."""
    steps, report, plan = subject.steps, subject.report, subject.plan
    expected, titles = plan.frozen.expected, plan.job.preview_titles
    view: dict[str, Any] = {"subject": subject, "report": report, "expected": expected}
    if steps.last:
        measured = statistics.median(steps.seconds[2:] or steps.seconds)  # without the warm-up
        measured = report.measured_step_seconds if report else measured
        waits = statistics.fmean(steps.data_seconds[2:] or steps.data_seconds)
        losses = loss_change(steps.loss)
        view["losses"] = (report.first_loss, report.final_loss) if report else losses
        view |= {"step_seconds": measured, "limit": limit_text(plan, measured, waits)}
    view["verdict"] = adapter_lines(report) if report and report.verdict else []
    if report:
        view["warnings"] = [*report.warnings, *missed_promises(report)]
        own = expected.process_memory_bytes
        both = (phase_bytes(each, own) for each in (report.phases, report.expected_phases))
        view["phases"] = _bars(plan, *both)
    view["charts"] = _run_charts(subject) if len(steps.step) > 1 else []
    view["previews"] = [
        (titles[number] if number < len(titles) else f"prompt {number + 1}", list(pictures))
        for number, pictures in groupby(sorted(subject.previews), lambda each: each[0])
    ]
    view["moved"] = [(name, own[0], own[-1]) for name, own in view["previews"] if len(own) > 1]
    return view


def _run_charts(subject: Subject) -> list[tuple[str, Part]]:
    steps, frozen = subject.steps, subject.plan.frozen
    told: Callable[[float], str] = lambda loss: f"smoothed loss {loss_text(loss)}"  # noqa: E731
    lines = [
        _trace("raw", _thinned(steps.step, steps.loss)),
        _trace("smooth", _thinned(steps.step, smoothed(steps.loss), told)),
    ]
    title = "Loss of each step (thin) and smoothed (thick)."
    charts = [("Loss", _chart(title, lines, _axis("step"), _axis("loss", steps.loss)))]
    if held_out := _held_out(steps):
        charts.append(("Held-out images", held_out))

    planned = frozen.expected.step_seconds
    median = statistics.median(steps.seconds[2:] or steps.seconds)
    hiccups = [seconds - median for seconds in steps.seconds if seconds > HICCUP * median]
    number = f"{len(hiccups)} hiccup{'s' * (len(hiccups) != 1)}"
    slow = f"{number} (over {HICCUP:.0f} times the median of {seconds_text(median)})"
    cost = f", {seconds_text(sum(hiccups))} lost to them" if hiccups else ""

    def took(seconds: float) -> str:
        return f"{seconds_text(seconds)}, {seconds / planned:.3g} times the plan"

    times = _chart(
        f"Seconds of each step, the slowest of neighbors. {slow}{cost}.",
        [_trace("smooth", _thinned(steps.step, steps.seconds, took, max))],
        _axis("step"),
        _axis("seconds", suffix=" s", from_zero=True),
        [("y", planned, f"planned {seconds_text(planned)}")],
    )

    promise, budget = frozen.expected.run_memory_bytes, frozen.hardware.budget_bytes
    largest = max(promise, *steps.memory_bytes)
    unit, suffix = _memory_unit([largest])
    rules: list[Rule] = [("y", promise / unit, f"promised {memory_text(promise)}")]
    far = f" The budget, {memory_text(budget)}, is far above."
    if budget <= SHOWN_BUDGET * largest:
        rules, far = [*rules, ("y", budget / unit, f"budget {memory_text(budget)}")], ""
    held = _thinned(steps.step, steps.memory_bytes, lambda size: f"{memory_text(size)} held", max)
    memory = _chart(
        f"Memory that is held between steps, and what is promised for the whole run.{far}",
        [_trace("smooth", [(at, size / unit, label) for at, size, label in held])],
        _axis("step"),
        _axis("memory", suffix=suffix),
        rules,
    )
    return [*charts, ("Step time", times), ("Memory", memory)]


def _held_out(steps: Steps) -> Part | None:
    known = [at for at, loss in enumerate(steps.validation_loss) if not math.isnan(loss)]
    bases = [base for base in steps.base_validation_loss if not math.isnan(base)]
    if not known or not bases:
        return None
    numbers = [steps.step[at] for at in known]
    losses = [steps.validation_loss[at] for at in known]
    base, lowest = bases[-1], min(zip(numbers, losses, strict=True), key=lambda each: each[1])

    def words(loss: float) -> str:
        return f"{loss_text(loss)}, {change_text(loss / base - 1, 1) if base > 0 else '-'}"

    [best] = _thinned(lowest[:1], lowest[1:], words)
    read = sorted({*_thinned(numbers, losses, words), best})
    lines = [
        _trace("smooth", [(at, loss, "") for at, loss, _ in read]),
        _trace("measured", [point for point in read if point != best]),
        _trace("chosen", [best]),
    ]
    title = f"lowest {loss_text(lowest[1])} after step {lowest[0]:.0f}"
    y = _axis("loss", [base, *(loss for _, loss, _ in read)])
    rule: Rule = ("y", base, f"without the adapter {loss_text(base)}")
    return _chart(f"Loss on images that never train: {title}.", lines, _axis("step"), y, [rule])


def _axis(
    label: str, values: Iterable[float] = (), *, suffix: str = "", from_zero: bool = False
) -> Part:
    known = list(values)
    is_log = not from_zero and 0 < WIDE_RATIO * min(known, default=0) < max(known, default=0)
    return {
        "gridcolor": "--line",
        "linecolor": "--gray",
        "showline": True,
        "zeroline": False,
        "tickformat": ".6~g",
        "title": {"text": label, "standoff": 8},
        "ticksuffix": suffix,
        "type": "log" if is_log else "linear",
        "rangemode": "tozero" if from_zero else "normal",
        "nticks": 3 if is_log else 7,
        "automargin": True,
    }


def _memory_unit(sizes: Sequence[float]) -> tuple[float, str]:
    return (2.0**30, " GiB") if max(sizes, default=0) >= 2**30 else (2.0**20, " MiB")


def _trace(look: str, points: Sequence[Reading], name: str | None = None) -> Part:
    words = [text.printable_lines(told) for _, _, told in points if told]
    return {
        **LOOKS[look],
        "name": name,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "customdata": words,
        "hoverinfo": "text" if words else "skip",
    }


def _thinned(
    steps: Sequence[float],
    values: Sequence[float],
    words: Callable[[float], str] | None = None,
    keep: Callable[[Sequence[float]], float] = lambda values: values[-1],
) -> list[Reading]:
    # At most `MAX_POINTS`: the last step of neighbors, and what to keep of their values.
    size = -(-len(steps) // MAX_POINTS)
    chunks = [slice(start, start + size) for start in range(0, len(steps), max(1, size))]
    kept = [(steps[chunk][-1], keep(values[chunk])) for chunk in chunks]
    return [(step, y, f"step {step:.0f}: {words(y)}" if words else "") for step, y in kept]


def _chart(
    title: str, traces: Sequence[Part], x: Part, y: Part, rules: Sequence[Rule] = ()
) -> Part:
    named = [{"type": "scatter", "showlegend": bool(t["name"]), **t} for t in traces]
    shapes = [
        _rule(rule, side, {"x": x, "y": y}[rule[0]], [at for t in named for at in t[rule[0]]])
        for rule, side in zip(rules, ("end", "start"), strict=False)
    ]
    layout = _LAYOUT | {"xaxis": x, "yaxis": y, "shapes": shapes, "hoverdistance": -1}
    has_marks = any(trace["mode"] == "markers" for trace in named)
    layout["hovermode"] = "closest" if has_marks else "x"
    figure = json.dumps({"data": named, "layout": layout}, allow_nan=False)
    return {"title": title, "figure": figure}


def _rule(rule: Rule, side: str, axis: Part, shown: Sequence[float]) -> Part:
    # Dashed, with a label that stays on the chart wherever the line lies.
    way, value, words = rule
    other = "y" if way == "x" else "x"
    is_from_zero = axis["rangemode"] == "tozero"
    is_lowest = way == "y" and value <= min(shown, default=0.0) and not is_from_zero
    if way == "x":
        low, high = min(*shown, value), max(*shown, value)
        middle = (low * high) ** 0.5 if axis["type"] == "log" else (low + high) / 2
        side = "end" if value > middle else "start"
    label = {
        "text": words,
        "padding": 3,
        "textangle": 0,
        "textposition": side if way == "y" else "end",
        "xanchor": {"end": "right", "start": "left"}[side],
        "yanchor": "bottom" if is_lowest else "top",
    }
    return {
        "type": "line",
        **{f"{way}0": value, f"{way}1": value, f"{other}0": 0, f"{other}1": 1},
        f"{other}ref": f"{other} domain",
        "line": {"color": "--text", "width": 1.5, "dash": "dash"},
        "label": label,
    }
