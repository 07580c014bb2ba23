"""The part of a page that is about a run: curves, memory, previews, promise against measurement."""

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from xml.etree.ElementTree import Element

from autotune.reporting.page.charts import (
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
from autotune.reporting.page.html import Child, h, image_source, table
from autotune.reporting.page.limits import limit_text
from autotune.reporting.page.phases import compared_phases
from autotune.reporting.page.subjects import Comparison, Picture, PreviewPicture, RunSubject
from autotune.reporting.run import gradient_lines, validation_lines, verdict_lines
from autotune.reporting.text import (
    change_text,
    energy_text,
    loss_text,
    memory_text,
    seconds_text,
    smoothed,
    time_left_text,
)
from autotune.schema import StepFinished

HICCUP = 3.0
"""How many times the median a step must take to be called a hiccup."""


def run_sections(subject: RunSubject) -> list[Element]:
    """Everything about a run, how it stands first."""
    warnings = subject.report.warnings if subject.report else ()
    return [
        _answer(subject),
        *(h("p", note, class_="warning") for note in (*warnings, *subject.notes)),
        *_pictures(subject),
        h("div", *(h("section", part) for part in _charts(subject)), class_="wide small"),
        *_compared(subject),
    ]


def _answer(subject: RunSubject) -> Element:
    steps, report, expected = subject.steps, subject.report, subject.plan.frozen.expected
    found: list[tuple[str, Child, str]] = [("State", h("b", _state(subject)), "")]
    if steps:
        change = smoothed([step.loss for step in steps])
        found.append(
            (
                "Loss, smoothed",
                h("b", loss_text(change[-1])),
                f", from {loss_text(steps[0].loss)} at the first step",
            )
        )
        measured = report.measured_step_seconds if report else statistics.median(_seconds(steps))
        words = (
            f", planned {seconds_text(expected.step_seconds)} "
            f"({change_text(measured / expected.step_seconds - 1)})"
        )
        found.append(("Step time", h("b", seconds_text(measured)), words))
        waits = statistics.fmean(step.data_seconds for step in steps[2:] or steps)
        found.append(("Limited by", limit_text(subject.plan, measured, waits), ""))
    if report and report.measured_joules_per_image is not None:
        promised = report.expected_joules_per_image
        words = "" if promised is None else f", planned {energy_text(promised)}"
        found.append(
            ("Energy an image", h("b", energy_text(report.measured_joules_per_image)), words)
        )
    if report and report.verdict:
        lines = [*verdict_lines(report.verdict), *gradient_lines(report)]
        lines += validation_lines(report.validation) if report.validation else []
        found.append(("Adapter", [h("p", line) for line in lines], ""))
    return h(
        "dl",
        ((h("dt", term), h("dd", shown, words)) for term, shown, words in found),
        class_="answer",
    )


def _state(subject: RunSubject) -> str:
    if subject.report:
        return (
            f"finished: {subject.report.num_steps} steps in "
            f"{seconds_text(subject.report.total_seconds)}"
        )
    if not subject.steps:
        return "no step is known" if subject.notes else "no step has been taken yet"
    last = subject.steps[-1]
    left = time_left_text(last.remaining_seconds)
    return f"step {last.step} of {last.num_steps}" + (f", {left}" if left else "")


def _seconds(steps: Sequence[StepFinished]) -> list[float]:
    return [step.seconds for step in steps[2:] or steps]  # the first ones warm up


def _charts(subject: RunSubject) -> list[Element]:
    steps = subject.steps
    if len(steps) < 2:
        return []
    held_out = _held_out(steps)
    return [
        _loss(steps),
        *held_out,
        _rate(steps),
        _gradients(steps),
        _times(subject),
        _memory(subject),
    ]


def _curve(
    head: str,
    title: str,
    y: Part,
    points: Sequence[tuple[float, float]],
    text: Callable[[float], str],
    *,
    raw: Sequence[tuple[float, float]] = (),
    rules: Sequence[Rule] = (),
) -> Element:
    """A line over the steps under a heading, over a thin one of `raw` values; `text` says a
    value in words.
    """
    lines = [*([line("raw", raw)] if raw else ()), line("smooth", points, text)]
    return h("div", h("h3", head), chart(title, lines, axis("step", ()), y, rules))


def _loss(steps: Sequence[StepFinished]) -> Element:
    raw = [(float(step.step), step.loss) for step in steps]
    smooth = [
        (a, value) for (a, _), value in zip(raw, smoothed([loss for _, loss in raw]), strict=True)
    ]
    y, shown = axis("loss", [loss for _, loss in raw]), thinned(smooth, _last)
    title = "Loss of each step (thin) and smoothed (thick)."
    return _curve(
        "Loss", title, y, shown, lambda b: f"smoothed loss {loss_text(b)}", raw=thinned(raw, _last)
    )


def _held_out(steps: Sequence[StepFinished]) -> list[Element]:
    """The loss on held-out images; nothing if it was never measured."""
    measured = [
        step
        for step in steps
        if step.validation_loss is not None and step.base_validation_loss is not None
    ]
    if not measured:
        return []
    points = [(float(step.step), step.validation_loss or 0.0) for step in measured]
    base, lowest = measured[-1].base_validation_loss or 0.0, min(points, key=lambda point: point[1])
    shown = sorted({*thinned(points, _last), lowest})
    changes = [change_text(loss / base - 1, 1) if base > 0 else "-" for _, loss in shown]
    read = [
        (a, b, f"after step {a:.0f}: {loss_text(b)}, {change}")
        for (a, b), change in zip(shown, changes, strict=True)
    ]
    began = measured[-1].overfitting_from
    named = "" if began is None else f" Overfitting began after step {began}."
    figure = chart(
        f"Loss on images that never train: lowest {loss_text(lowest[1])} after step "
        f"{lowest[0]:.0f}.{named}",
        [
            line("smooth", shown),
            marks("measured", [point for point in read if point[:2] != lowest]),
            marks("chosen", [point for point in read if point[:2] == lowest]),
        ],
        axis("step", ()),
        axis("loss", [base, *(loss for _, loss in shown)]),
        [("y", base, f"without the adapter {loss_text(base)}")],
    )
    return [h("div", h("h3", "Held-out images"), figure)]


def _gradients(steps: Sequence[StepFinished]) -> Element:
    norms = thinned(
        [(float(s.step), s.gradient_norm) for s in steps if s.gradient_norm is not None], max
    )
    last = steps[-1]
    skipped = last.overflowed_gradients
    overflows = f"; steps skipped since fp16 overflowed: {skipped}" if skipped else ""
    counts = f"Spikes: {last.gradient_spikes}; not finite: {last.nonfinite_gradients}{overflows}."
    title = f"Norm of each step's gradient before clipping, the largest of neighbors. {counts}"
    return _curve(
        "Gradient",
        title,
        axis("norm", [norm for _, norm in norms], from_zero=True),
        norms,
        "norm {:.3g}".format,
    )


def _rate(steps: Sequence[StepFinished]) -> Element:
    rates = thinned([(float(step.step), step.learning_rate) for step in steps], _last)
    y = axis("learning rate", (), from_zero=True)
    return _curve(
        "Learning rate", "Learning rate of each step.", y, rates, "learning rate {:.3g}".format
    )


def _times(subject: RunSubject) -> Element:
    steps, planned = subject.steps, subject.plan.frozen.expected.step_seconds
    median = statistics.median(_seconds(steps))
    hiccups = [step for step in steps if step.seconds > HICCUP * median]
    times = thinned([(float(step.step), step.seconds) for step in steps], max)
    y = axis("seconds", [planned, *(seconds for _, seconds in times)], suffix=" s", from_zero=True)
    number = f"{len(hiccups)} hiccup{'s' * (len(hiccups) != 1)}"
    slow = f"{number} (over {HICCUP:.0f} times the median of {seconds_text(median)})"
    lost = sum(step.seconds - median for step in hiccups)
    cost = f", {seconds_text(lost)} lost to them" if hiccups else ""
    title = f"Seconds of each step, the slowest of neighbors. {slow}{cost}."

    def text(seconds: float) -> str:
        return f"{seconds_text(seconds)}, {seconds / planned:.3g} times the plan"

    return _curve(
        "Step time",
        title,
        y,
        times,
        text,
        rules=[("y", planned, f"planned {seconds_text(planned)}")],
    )


def _memory(subject: RunSubject) -> Element:
    frozen = subject.plan.frozen
    sizes = [step.memory_bytes for step in subject.steps]
    promise, budget = frozen.expected.run_memory_bytes, frozen.hardware.budget_bytes
    unit, suffix = memory_unit([promise, *sizes])
    held = thinned([(float(step.step), step.memory_bytes / unit) for step in subject.steps], max)
    is_near = budget <= SHOWN_BUDGET * max(promise, *sizes)
    rules = [("y", promise / unit, f"promised {memory_text(promise)}")]
    rules += [("y", budget / unit, f"budget {memory_text(budget)}")] if is_near else []
    far = "" if is_near else f" The budget, {memory_text(budget)}, is far above."
    title, y = (
        f"Memory that is held between steps, and what is promised for the whole run.{far}",
        axis("memory", (), suffix=suffix),
    )
    return _curve("Memory", title, y, held, lambda b: f"{memory_text(b * unit)} held", rules=rules)


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _pictures(subject: RunSubject) -> list[Element]:
    sections = []
    if subject.comparisons:
        sliders = [_slider(each) for each in subject.comparisons]
        sections.append(
            h("section", h("h3", "Before and after"), h("div", *sliders, class_="side-by-side"))
        )
    prompts = subject.plan.job.preview_prompts
    if subject.previews:
        grids = [
            _preview_row(
                prompts[number] if number < len(prompts) else f"prompt {number + 1}", list(pictures)
            )
            for number, pictures in groupby(
                sorted(subject.previews, key=lambda p: (p.number, p.step)), lambda p: p.number
            )
        ]
        sections.append(h("section", h("h3", "Previews"), *grids))
    return [h("div", *sections, class_="wide")] if sections else []


def _preview_row(prompt: str, pictures: list[PreviewPicture]) -> Element:
    figures = [
        h(
            "figure",
            _image(each.picture, f"{prompt}, after step {each.step}"),
            h("figcaption", f"step {each.step}"),
        )
        for each in pictures
    ]
    row = h(
        "div",
        *figures,
        class_="previews",
        tabindex=0,
        role="region",
        aria_label=f"Previews of: {prompt}",
    )
    return h("div", h("p", prompt, class_="soft"), row)


def _slider(compared: Comparison) -> Element:
    without = _image(compared.without, f"{compared.label}, without the adapter")
    with_adapter = _image(compared.with_adapter, f"{compared.label}, with the adapter")
    label = f"How much of the picture without the adapter: {compared.label}"
    return h(
        "figure",
        h("figcaption", compared.label),
        h("div", without, with_adapter, class_="both"),
        h("input", type="range", min=0, max=100, value=50, aria_label=label),
        h("p", h("span", "left: without the adapter"), h("span", "right: with it"), class_="ends"),
        class_="slider",
    )


def _image(picture: Picture, text: str) -> Element:
    source = image_source(picture.content, picture.kind)
    return h(
        "img", src=source, alt=text, width=picture.width, height=picture.height, loading="lazy"
    )


def _compared(subject: RunSubject) -> list[Element]:
    report, frozen = subject.report, subject.plan.frozen
    if report is None:
        return []
    rows = [
        (
            "step time",
            *_pair(report.expected_step_seconds, report.measured_step_seconds, seconds_text),
        ),
        (
            "step memory",
            *_pair(
                report.expected_peak_memory_bytes, report.measured_peak_memory_bytes, memory_text
            ),
        ),
        (
            "images per second",
            *_pair(frozen.expected.images_per_second, report.images_per_second, "{:.3g}".format),
        ),
        ("whole run", *_pair(subject.plan.job_seconds, report.total_seconds, seconds_text)),
    ]
    head, caption = (
        ("", "promised", "measured", "difference"),
        "What the plan promised, and what the run took.",
    )
    phases = compared_phases(
        report, frozen.expected.process_memory_bytes, frozen.hardware.budget_bytes
    )
    against = h("section", h("h3", "Promised against measured"), table(head, rows, caption=caption))
    return [h("div", against, h("section", h("h3", "Memory by phase"), phases), class_="wide")]


def _pair(
    promised: float, measured: float | None, text: Callable[[float], str]
) -> tuple[str, str, str]:
    difference = change_text(measured / promised - 1, 1) if measured and promised else "-"
    return text(promised), "-" if measured is None else text(measured), difference
