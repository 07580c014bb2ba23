"""The page as text: what it says, that it is whole by itself, and that no text in it becomes
markup.
"""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree.ElementTree import tostring

import pytest
from autotune.reporting.page.build import build_page
from autotune.reporting.page.charts import SYMBOLS, axis, thinned
from autotune.reporting.page.html import h
from autotune.reporting.page.subjects import PlanSubject, Point, Subject, nearest_beyond, points_of
from autotune.reporting.page.worth import find_worths
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from autotune.errors import InvalidInput
from autotune.reporting.page import html
from autotune.schema.plan import Reason, Rejected
from autotune.schema.run import ValidationResult
from autotune.schema.trial import Residual
from tests.reporting.page.pages import HOSTILE, golden_plan, plan_subject, run_subject


class Outline(HTMLParser):
    """Tags, attributes and text as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(*subjects: Subject) -> Outline:
    return Outline(build_page(subjects, "0.1.0"))


@pytest.mark.parametrize("subject", [plan_subject(), run_subject(), run_subject(finished=False)])
def test_a_page_is_whole_by_itself(subject: Subject) -> None:
    page = build_page([subject], "0.1.0")
    tags = Outline(page).tags
    assert not [
        tag for tag, _ in tags if tag in ("link", "iframe", "object", "embed", "base", "form", "a")
    ]
    sources = [
        value
        for _, attrs in tags
        for name, value in attrs.items()
        if name in ("src", "href", "xlink:href")
    ]
    assert all(source and source.startswith("data:image/") for source in sources)
    assert page.count(plotly := get_plotlyjs()) == 1
    assert not re.search(r"@import|url\(|https?://", page.replace(plotly, ""))
    assert len(page) < len(plotly) + 200_000


def test_the_policy_admits_the_page_s_own_script_alone() -> None:
    page = build_page([run_subject()], "0.1.0")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(attrs["content"] for _, attrs in Outline(page).tags if attrs.get("http-equiv"))
    assert policy
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def hostile_plan() -> PlanSubject:
    subject = plan_subject()
    rejected = (Rejected(choice=HOSTILE, reason=HOSTILE),)
    reasons = (Reason(knob=HOSTILE, chosen=HOSTILE, why=HOSTILE, rejected=rejected),)
    model = subject.workload.model.changed(name=HOSTILE)
    return replace(
        subject,
        name=HOSTILE,
        device_name=HOSTILE,
        workload=subject.workload.changed(model=model),
        settings=subject.settings.changed(attention=HOSTILE),
        reasons=reasons,
        advice=(HOSTILE,),
        forecast=None,
    )


def test_no_text_of_a_file_becomes_markup() -> None:
    run = run_subject(prompt=HOSTILE.replace("\x00", ""))
    assert run.report
    run = replace(
        run, name=HOSTILE, notes=(HOSTILE,), report=run.report.changed(warnings=(HOSTILE,))
    )
    page = page_of(hostile_plan(), run)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert not [attrs for tag, attrs in page.tags if tag == "img" and attrs["src"] == "x"]
    assert "</title><script>window.hacked = 1</script>" in page.text, "it is shown as text"
    assert not {"\u202e", "\x00"} & set(page.text), "and turns no writing around"


@settings(max_examples=50)
@given(st.text(), st.text())
def test_any_text_and_attribute_comes_back_as_it_was_or_without_control_characters(
    text: str, value: str
) -> None:
    page = Outline(tostring(h("p", text, title=value, id="it"), encoding="unicode", method="html"))
    _, attributes = next(each for each in page.tags if each[1].get("id") == "it")
    expected = "".join(c if c.isprintable() or c == "\n" else "?" for c in value)
    assert attributes["title"] == expected
    assert len([tag for tag, _ in page.tags if tag == "p"]) == 1


def test_a_newcomer_can_name_batch_reason_and_nearest_out_of_memory() -> None:
    text = page_of(plan_subject("wall")).text
    assert "Chosen batch micro-batch 1 , accumulated 2 times to the effective batch of 2" in text
    assert re.search(r"Why it won It is the fastest of \d+ candidates that were tried here", text)
    assert re.search(r"Nearest out-of-memory With \S.* a trial ran out of memory", text)


def test_what_is_beyond_the_budget_is_told_if_nothing_ran_out() -> None:
    subject = plan_subject("measured")
    sizes = sorted(
        point.run_memory_bytes for point in points_of(subject) if point.kind == "predicted"
    )
    subject = replace(subject, budget_bytes=sizes[len(sizes) // 2])
    points = points_of(subject)
    nearest = nearest_beyond(subject, points)
    assert nearest
    beyond = [point for point in points if point.kind == "beyond"]
    faster = [
        point for point in beyond if point.images_per_second > chosen_of(points).images_per_second
    ]
    assert nearest.run_memory_bytes == min(point.run_memory_bytes for point in faster or beyond)
    assert nearest.run_memory_bytes > subject.budget_bytes
    assert "too much (predicted not to fit)" in page_of(subject).text


def chosen_of(points: list[Point]) -> Point:
    (chosen,) = [point for point in points if point.is_chosen]
    return chosen


@pytest.mark.parametrize("name", ["wall", "known", "measured"])
def test_points_are_what_the_plan_says(name: str) -> None:
    subject = plan_subject(name)
    points = points_of(subject)
    expected = subject.expected
    assert chosen_of(points).images_per_second == pytest.approx(expected.images_per_second)
    assert chosen_of(points).run_memory_bytes == expected.run_memory_bytes
    ran = {trial.candidate for trial in subject.trials if trial.outcome == "ok"}
    assert {point.candidate for point in points if point.kind == "measured"} == ran | {
        subject.settings
    }
    for point in points:
        beaten = any(
            other.images_per_second >= point.images_per_second and other.run_memory_bytes < point.run_memory_bytes
            for other in points if other.kind in ("measured", "predicted")
        )  # fmt: skip
        assert not (point.is_front and beaten)


def test_a_failed_trial_is_placed_by_its_prediction_and_named() -> None:
    subject = plan_subject("wall")
    failed = [point for point in points_of(subject) if point.kind == "failed"]
    assert {p.candidate for p in failed} == {
        t.candidate for t in subject.trials if t.outcome == "oom"
    }
    assert all("ran out of memory" in point.outcome for point in failed)


def test_a_knob_is_worth_the_difference_to_its_best_other_value() -> None:
    subject = plan_subject("measured")
    worths = find_worths(subject, points_of(subject))
    assert {worth.knob for worth in worths} >= {"micro_batch_size", "quantization"}
    own = next(t for t in subject.trials if t.candidate == subject.settings).median_step_seconds
    assert own
    batch = subject.workload.effective_batch_size
    for worth in worths:
        assert getattr(worth.point.candidate, worth.knob) != getattr(subject.settings, worth.knob)
        if worth.point.kind == "measured":
            assert worth.speed == pytest.approx(worth.point.images_per_second / (batch / own) - 1)


def test_every_trial_shows_how_far_its_prediction_was_off() -> None:
    subject = plan_subject("wall")
    assert subject.forecast
    trial = next(trial for trial in subject.trials if trial.outcome == "ok")
    row = next(
        a for a in subject.forecast.alternatives if a.candidate(subject.settings) == trial.candidate
    )
    assert trial.median_step_seconds
    error = f"{row.step_seconds / trial.median_step_seconds - 1:+.0%}"
    assert error != "+0%"
    assert error in page_of(subject).text


def test_a_record_shows_how_far_its_predictions_were_off() -> None:
    subject = plan_subject("wall")
    residuals = tuple(Residual(time=math.log(2.5), memory=math.log(1.25)) for _ in subject.trials)
    text = page_of(replace(subject, kind="record", forecast=None, residuals=residuals)).text
    assert text.count("-60%") == text.count("-20.0%") == len(subject.trials)


def test_a_run_says_how_it_stands() -> None:
    running, ended = page_of(run_subject(finished=False)).text, page_of(run_subject()).text
    assert "step 40 of 100, 1 min 00 s left" in running
    assert "finished: 100 steps in 2 min 03 s" in ended
    assert "1 hiccup (over 3 times the median of 1.000 s), 9.000 s lost to them" in ended
    assert re.search(
        r"Limited by (compute|memory bandwidth), \d+% of what this device reached in the probe",
        ended,
    )
    assert "memory is at 9 GiB" in ended, "a warning is shown"
    assert "0.5000 without the adapter, 0.2500 with it (-50.0%)" in ended


def test_a_run_shows_its_loss_on_held_out_images_and_names_overfitting() -> None:
    subject = run_subject()
    steps = [
        step.changed(
            validation_loss=loss,
            base_validation_loss=0.5,
            overfitting_from=50 if step.step == 100 else None,
        )
        if (loss := {25: 0.45, 50: 0.4, 75: 0.41, 100: 0.42}.get(step.step))
        else step
        for step in subject.steps
    ]
    held_out = ValidationResult(
        num_images=3, base_loss=0.5, final_loss=0.42, lowest_loss=0.4, lowest_step=50,
        overfitting_from=50,
        kept_step=100,
    )  # fmt: skip
    assert subject.report
    report = subject.report.changed(validation=held_out, gradient_spikes=7, nonfinite_gradients=1)
    page = build_page([replace(subject, steps=steps, report=report)], "1")
    for words in (
        "Loss on images that never train: lowest 0.4000 after step 50. Overfitting began after "
        "step 50.",
        "after step 75: 0.4100, -18.0%",
        "without the adapter 0.5000",
        "loss on 3 held-out images: 0.5000 without the adapter, 0.4200 with it (-16.0%)",
        "lowest 0.4000 after step 50, not kept: --keep-best would",
        "(spikes): 7 of 100",
        "not finite, taken again: 1",
    ):
        assert words in page
    assert "Held-out images" not in build_page([subject], "1")


def test_previews_and_comparison_are_labeled() -> None:
    page = page_of(run_subject())
    texts = [attrs["alt"] for tag, attrs in page.tags if tag == "img"]
    assert texts == [
        "a red heart, without the adapter", "a red heart, with the adapter",
        "a red heart, after step 25", "a red heart, after step 50",
    ]  # fmt: skip


def test_several_are_shown_side_by_side_with_what_differs() -> None:
    page = page_of(plan_subject("wall"), plan_subject("measured"))
    assert "2 compared" in page.text
    assert [attrs.get("class") for tag, attrs in page.tags].count("subject") == 2
    assert f"{golden_plan('wall').frozen.expected.images_per_second:.3g} images/s" in page.text


def test_a_plan_of_an_older_autotune_has_a_page_too() -> None:
    assert (
        "Memory against speed" in page_of(replace(plan_subject(), forecast=None, reasons=())).text
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 8.1], "log"), ([1, 7.9], "linear"), ([0, 9], "linear"), ([], "linear")],
)
def test_an_axis_of_values_far_apart_is_logarithmic(values: list[float], kind: str) -> None:
    assert axis("x", values)["type"] == kind
    assert axis("x", values, can_log=False)["type"] == "linear"


@pytest.mark.parametrize("subject", [plan_subject(), run_subject(), run_subject(finished=False)])
def test_plotly_knows_every_property_of_the_figures(subject: Subject) -> None:
    figures = [attrs["data-figure"] for _, attrs in page_of(subject).tags if "data-figure" in attrs]
    assert len(figures) == (1 if isinstance(subject, PlanSubject) else 6)
    for figure in figures:
        Figure(json.loads(re.sub('"--[a-z]+"', '"#123456"', figure or "")))


def test_marks_differ_without_color() -> None:
    assert len({symbol for symbol, _, _ in SYMBOLS.values()}) == len(SYMBOLS)


def test_without_plotly_a_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="plotly, which is not installed") as caught:
        build_page([plan_subject()], "0.1.0")
    assert "pip install 'lora-autotune[report]'" in caught.value.hint


@given(st.integers(1, 5000))
def test_a_long_line_is_thinned_to_what_a_screen_shows(number: int) -> None:
    points = [(float(i), float(i)) for i in range(number)]
    kept = thinned(points, max)
    assert len(kept) <= 300
    assert kept[-1] == points[-1]
    assert max(value for _, value in kept) == number - 1


def test_energy_that_no_plan_promised_is_told_without_a_dash() -> None:
    subject = run_subject()
    assert subject.report
    for promised, words in ((None, "</b></dd>"), (4.0, "</b>, planned 4")):
        report = subject.report.changed(
            expected_joules_per_image=promised, measured_joules_per_image=3.0
        )
        page = build_page([replace(subject, report=report)], "1")
        assert page.partition("Energy an image")[2].partition("3 J")[2].lstrip().startswith(words)
