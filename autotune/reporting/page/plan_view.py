"""The part of a page that is about a plan or a record."""

import math
from xml.etree.ElementTree import Element

from autotune.knobs import KNOBS
from autotune.reporting.page.charts import SHOWN_BUDGET, axis, chart, line, marks, memory_unit
from autotune.reporting.page.html import h, table
from autotune.reporting.page.phases import phase_bars
from autotune.reporting.page.subjects import OUTCOMES, PlanSubject, Point, nearest_beyond, points_of
from autotune.reporting.page.worth import find_worths, worth_table
from autotune.reporting.plan import describe_changes, settings_items
from autotune.reporting.text import energy_text, memory_text, seconds_text, uncertainty_text
from autotune.schema import GOALS, Residual


def plan_sections(subject: PlanSubject) -> list[Element]:
    """Everything about it, the answer first."""
    points = points_of(subject)
    speed = h(
        "section",
        h("h3", "Memory against speed"),
        _scatter(subject, points),
        _points_table(subject, points),
    )
    phases = phase_bars(subject.expected, subject.forecast, subject.budget_bytes)
    return [
        _answer(subject, points),
        h("div", speed, h("section", h("h3", "Memory by phase"), phases), class_="wide"),
        h("section", h("h3", "What each knob is worth here"), worth_table(subject, points)),
        *_trials(subject),
        _settings(subject),
        *_reasons(subject),
        *(
            [h("section", h("h3", "Notes"), (h("p", text) for text in subject.advice))]
            if subject.advice
            else []
        ),
    ]


def _answer(subject: PlanSubject, points: list[Point]) -> Element:
    """What a newcomer asks first: which batch, why, how much is left, and what would be too
    much.
    """
    settings, expected, work = subject.settings, subject.expected, subject.workload
    steps = -(-work.effective_batch_size // settings.micro_batch_size)
    batch = f"micro-batch {settings.micro_batch_size}"
    accumulated = (
        f", accumulated {steps} times to the effective batch of {work.effective_batch_size}"
    )
    took = f"{seconds_text(expected.step_seconds)}{uncertainty_text(expected.time_uncertainty)}"
    step = f"{took} for a step of {work.effective_batch_size}"
    left = memory_text(subject.budget_bytes - expected.run_memory_bytes)
    budget = f"{memory_text(subject.budget_bytes)} that a run may take; {left}"
    joules = expected.joules_per_image
    found = [
        (
            "Chosen batch",
            h("b", batch),
            accumulated if steps > 1 else ", the whole effective batch at once",
        ),
        ("Why it won", _why(subject, points)),
        (
            "Speed",
            h("b", f"{expected.images_per_second:.3g} images/s"),
            f", {step} ({expected.evidence})",
        ),
        ("Memory", h("b", memory_text(expected.run_memory_bytes)), f" of the {budget} stay free"),
        *(
            [("Energy", h("b", energy_text(joules)), " an image, by the GPU alone")]
            if joules
            else ()
        ),
        ("Nearest out-of-memory", _nearest(subject, points)),
    ]
    return h("dl", ((h("dt", term), h("dd", *words)) for term, *words in found), class_="answer")


def _why(subject: PlanSubject, points: list[Point]) -> str:
    forecast, trials = subject.forecast, subject.trials
    number = sum(not trial.confirms for trial in trials)
    goal = GOALS[subject.workload.objective]
    if number:
        looked = (
            f" (of {forecast.num_candidates} candidates that were predicted)" if forecast else ""
        )
        basis = (
            f"It is the {goal} of {number} candidate{'s' * (number > 1)} that were tried "
            f"here{looked}"
        )
    elif forecast:
        number, total = forecast.num_fitting, forecast.num_candidates
        basis = f"It is the {goal} of {number} candidates that are predicted to fit, of {total}"
    else:
        basis = f"It is the {goal} of what is predicted to fit"
    chosen = next(point for point in points if point.is_chosen)
    running = [point for point in points if point.kind in ("measured", "predicted")]
    if any(
        point.images_per_second > chosen.images_per_second
        for point in running
        if point.kind == chosen.kind
    ):
        basis += ", within 3%: such ties go to what is more exact, then to what needs less memory"
    compared = [
        f"with micro-batch {worth.point.candidate.micro_batch_size} the best is "
        f"{abs(worth.speed):.0%} "
        f"{'faster' if worth.speed > 0 else 'slower'}"
        for worth in find_worths(subject, points)
        if worth.knob == "micro_batch_size" and worth.runs
    ]
    return f"{'; '.join((basis, *compared))}."


def _nearest(subject: PlanSubject, points: list[Point]) -> str:
    nearest = nearest_beyond(subject, points)
    if nearest is None:
        largest = max(points, key=lambda point: point.run_memory_bytes)
        return (
            "None: of what was looked at nothing needs more than "
            f"{memory_text(largest.run_memory_bytes)}."
        )
    if nearest.kind == "failed":
        needs = memory_text(nearest.run_memory_bytes)
        return (
            f"With {_named(subject, nearest)} a trial ran out of memory ({needs} were predicted)."
        )
    over = nearest.run_memory_bytes - subject.budget_bytes
    needs = f"would need {memory_text(nearest.run_memory_bytes)}"
    too_much = f", {memory_text(over)} too much" if over > 0 else ""
    return f"With {_named(subject, nearest)} a run {needs}{too_much} ({nearest.outcome})."


def _named(subject: PlanSubject, point: Point) -> str:
    return describe_changes(point.candidate, subject.settings) or "the chosen settings"


def _tip(subject: PlanSubject, point: Point) -> str:
    front = ", on the Pareto front" if point.is_front else ""
    changes = describe_changes(point.candidate, subject.settings)
    named = f"like the chosen, but {changes}" if changes else "the chosen settings"
    return (
        f"{point.images_per_second:.3g} images/s with {memory_text(point.run_memory_bytes)}: "
        f"{point.outcome}{front}. Settings: {named}."
    )


def _scatter(subject: PlanSubject, points: list[Point]) -> Element:
    budget = subject.budget_bytes
    largest = max(point.run_memory_bytes for point in points)
    is_near = budget <= SHOWN_BUDGET * largest
    unit, suffix = memory_unit(point.run_memory_bytes for point in points)
    shown = [(p.run_memory_bytes / unit, p.images_per_second, p, _tip(subject, p)) for p in points]
    front = sorted((memory, speed) for memory, speed, point, _ in shown if point.is_front)
    kinds = [
        (kind, words, [point for point in shown if point[2].kind == kind])
        for kind, words in LEGEND.items()
    ]
    kinds.append(("chosen", "chosen", [point for point in shown if point[2].is_chosen]))
    traces = [{**line("front", front), "name": "Pareto front"}]
    traces += [
        marks(kind, [(x, y, tip) for x, y, _, tip in found], words)
        for kind, words, found in kinds
        if found
    ]
    beyond = "" if is_near else f" The budget, {memory_text(budget)}, is far beyond the right end."
    means = "up is faster, left needs less memory, and nothing beats the Pareto front in both"
    return chart(
        f"Each mark is one set of settings: {means}.{beyond}",
        traces,
        axis("run memory, in its neediest phase", [memory for memory, *_ in shown], suffix=suffix),
        axis("speed in images/s", [speed for _, speed, *_ in shown]),
        [("x", budget / unit, f"budget {memory_text(budget)}")] if is_near else (),
    )


LEGEND = {
    "failed": "tried, did not run",
    "beyond": "predicted not to fit",
    "predicted": "predicted to fit, not tried",
    "measured": "measured here",
}
"""What marks mean; later ones are drawn above."""


def _points_table(subject: PlanSubject, points: list[Point]) -> Element:
    rows = [
        (
            describe_changes(point.candidate, subject.settings) or "chosen",
            f"{point.images_per_second:.3g}",
            memory_text(point.run_memory_bytes),
            point.outcome,
            "yes" if point.is_front else "",
        )
        for point in sorted(points, key=lambda point: -point.images_per_second)
    ]
    forecast = subject.forecast
    of_all = f" of {forecast.num_candidates}: those that tell most" if forecast else ""
    head = (
        "settings, as they differ from the chosen",
        "images/s",
        "run memory",
        "known how",
        "Pareto front",
    )
    body = table(head, rows, caption=f"{len(points)} candidates{of_all}")
    return h("details", h("summary", "The same as a table"), body)


def _trials(subject: PlanSubject) -> list[Element]:
    """Trials in their order, with how far the prediction before them was off."""
    if not subject.trials:
        return []
    errors = _prediction_errors(subject)
    rows = [
        (
            str(number),
            describe_changes(trial.candidate, subject.settings) or "the chosen settings",
            OUTCOMES[trial.outcome] + (" (longer trial)" if trial.confirms else ""),
            seconds_text(trial.median_step_seconds),
            "-" if error is None else f"{error[0]:+.0%}",
            memory_text(trial.peak_memory_bytes),
            "-" if error is None else f"{error[1]:+.1%}",
        )
        for number, (trial, error) in enumerate(zip(subject.trials, errors, strict=True), 1)
    ]
    settings = "settings, as they differ from the chosen"
    head = ("trial", settings, "outcome", "step", "its prediction", "step memory", "its prediction")
    told = "; “its prediction” is how far the one before any trial was off" if any(errors) else ""
    took = f" They took {seconds_text(subject.search_seconds)}." if subject.search_seconds else ""
    return [
        h(
            "section",
            h("h3", "Trials"),
            table(head, rows, caption=f"Trials in their order{told}.{took}"),
        )
    ]


def _prediction_errors(subject: PlanSubject) -> list[tuple[float, float] | None]:
    """For each trial how far time and memory were predicted off, relative to what was measured."""
    if subject.residuals:
        return [_relative_errors(residual) for residual in subject.residuals]
    alternatives = subject.forecast.alternatives if subject.forecast else ()
    predicted = {each.candidate(subject.settings): each for each in alternatives}
    errors: list[tuple[float, float] | None] = []
    for trial in subject.trials:
        before, seconds, memory = (
            predicted.get(trial.candidate),
            trial.median_step_seconds,
            trial.peak_memory_bytes,
        )
        if before and seconds and memory and trial.outcome == "ok":
            errors.append(
                (before.step_seconds / seconds - 1, before.step_memory_bytes / memory - 1)
            )
        else:
            errors.append(None)
    return errors


def _relative_errors(residual: Residual | None) -> tuple[float, float] | None:
    """The same from logarithms of measured over predicted."""
    return (
        None if residual is None else (math.exp(-residual.time) - 1, math.exp(-residual.memory) - 1)
    )


def _settings(subject: PlanSubject) -> Element:
    rows = settings_items(subject.settings, subject.workload)
    listing = table(("knob", "value"), rows, caption="All settings of the plan")
    return h("section", h("h3", "Settings"), h("details", h("summary", "All settings"), listing))


def _reasons(subject: PlanSubject) -> list[Element]:
    if not subject.reasons:
        return []
    titles = {knob.name: knob.title for knob in KNOBS}
    rows = [
        (
            titles.get(reason.knob, reason.knob),
            str(reason.chosen),
            reason.why,
            [h("p", h("b", f"{other.choice}: "), other.reason) for other in reason.rejected],
        )
        for reason in subject.reasons
    ]
    listing = table(
        ("knob", "chosen", "why", "what was not taken"), rows, caption="Why each knob has its value"
    )
    return [
        h("section", h("h3", "Reasons"), h("details", h("summary", "Reasons as a table"), listing))
    ]
