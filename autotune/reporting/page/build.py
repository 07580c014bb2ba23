"""Puts a page together: one subject from top to bottom, several side by side below a table that
compares them.
"""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from autotune.reporting.page.html import Child, document, h, table
from autotune.reporting.page.plan_view import plan_sections
from autotune.reporting.page.run_view import run_sections
from autotune.reporting.page.subjects import PlanSubject, RunSubject, Subject
from autotune.reporting.plan import describe_changes, settings_items
from autotune.reporting.text import loss_text, memory_text, seconds_text, uncertainty_text


def build_page(subjects: Sequence[Subject], autotune_version: str) -> str:
    """A whole page as HTML, which asks for nothing outside of itself.

    Args:
        subjects: what to show, at least one.
        autotune_version: named at the end of the page.
    """
    pairs = [(subject, _plan_of(subject)) for subject in subjects]
    if len(subjects) == 1:
        body: list[Child] = [
            h("h1", _title(subjects[0])),
            h("p", _subtitle(pairs[0][1]), class_="soft"),
        ]
        body += _sections(subjects[0])
    else:
        body = [h("h1", f"{len(subjects)} compared"), _comparison(pairs)]
        body.append(h("div", *(_column(*pair) for pair in pairs), class_="side-by-side"))
    foot = h(
        "p",
        f"Written by autotune {autotune_version}. This page is one file and loads nothing.",
        class_="soft",
    )
    return document(
        _title(subjects[0]) if len(subjects) == 1 else "autotune: a comparison", *body, foot
    )


def _column(subject: Subject, plan: PlanSubject) -> Element:
    return h(
        "div",
        h("h2", _title(subject)),
        h("p", _subtitle(plan), class_="soft"),
        *_sections(subject),
        class_="subject",
    )


def _sections(subject: Subject) -> list[Element]:
    if isinstance(subject, PlanSubject):
        return plan_sections(subject)
    plan = h("details", h("summary", "The plan that was run"), *plan_sections(_plan_of(subject)))
    return [*run_sections(subject), h("section", h("h3", "Plan"), plan)]


def _plan_of(subject: Subject) -> PlanSubject:
    return (
        subject
        if isinstance(subject, PlanSubject)
        else PlanSubject.of_plan(subject.name, subject.plan)
    )


def _title(subject: Subject) -> str:
    kind = subject.kind if isinstance(subject, PlanSubject) else "run"
    plan = _plan_of(subject)
    measured = (
        "measured "
        if plan.is_measured and kind == "plan"
        else "predicted "
        if kind == "plan"
        else ""
    )
    return f"{plan.workload.model.name}: {measured}{kind} {subject.name}"


def _subtitle(plan: PlanSubject) -> str:
    work, bucket = plan.workload, plan.workload.largest_bucket
    devices = (
        f"{plan.num_processes} x {plan.device_name}" if plan.num_processes > 1 else plan.device_name
    )
    frames = f", {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    return (
        f"On {devices}; {bucket.width_px} x {bucket.height_px} px{frames}, rank {work.rank}, "
        f"quality floor {work.quality}. "
        + (
            "Its figures were measured there."
            if plan.is_measured
            else "Its figures are predicted: nothing has run yet."
        )
    )


def _comparison(pairs: Sequence[tuple[Subject, PlanSubject]]) -> Element:
    """What differs, a column for each subject."""
    plans = [plan for _, plan in pairs]
    expected = [plan.expected for plan in plans]
    times = [
        seconds_text(each.step_seconds) + uncertainty_text(each.time_uncertainty)
        for each in expected
    ]
    rows: list[list[Child]] = [
        ["device", *(plan.device_name for plan in plans)],
        ["evidence", *(plan.expected.evidence for plan in plans)],
        ["speed", *(f"{plan.expected.images_per_second:.3g} images/s" for plan in plans)],
        ["step time", *times],
        ["run memory", *(memory_text(plan.expected.run_memory_bytes) for plan in plans)],
        ["budget", *(memory_text(plan.budget_bytes) for plan in plans)],
    ]
    reports = [subject.report if isinstance(subject, RunSubject) else None for subject, _ in pairs]
    if any(reports):
        rows.append(
            [
                "measured step",
                *(seconds_text(r.measured_step_seconds) if r else "-" for r in reports),
            ]
        )
        rows.append(["final loss", *(loss_text(r.final_loss) if r else "-" for r in reports)])
    listed = [dict(settings_items(plan.settings, plan.workload)) for plan in plans]
    rows += [
        [name, *(one[name] for one in listed)]
        for name in listed[0]
        if len({one[name] for one in listed}) > 1
    ]
    changed = describe_changes(plans[1].settings, plans[0].settings) if len(plans) == 2 else ""
    words = f" The second differs by: {changed}." if changed else ""
    return table(
        ("", *(subject.name for subject, _ in pairs)), rows, caption=f"What differs.{words}"
    )
