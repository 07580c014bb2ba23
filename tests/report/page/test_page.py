"""The page is whole by itself, shows the objects' numbers, and makes markup of no text."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from autotune.plan.plan import Reason, Rejected
from autotune.report.page import Subject, build_page, points_of
from tests.report.page.pages import HOSTILE, golden_plan, plan_subject, run_subject


class Outline(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def chosen_of(points):
    (chosen,) = [point for point in points if point.is_chosen]
    return chosen


@pytest.mark.parametrize("subject", [plan_subject(), run_subject(), run_subject(finished=False)])
def test_a_page_is_whole_by_itself(subject):
    text = b"".join(build_page([subject], "0.1.0")).decode()
    tags = Outline(text).tags
    outside = {"link", "iframe", "object", "embed", "base", "form", "a"}
    assert not outside & {tag for tag, _ in tags}
    sources = [attrs[name] for _, attrs in tags for name in ("src", "href") if name in attrs]
    assert all(source and source.startswith("data:image/") for source in sources)
    assert text.count(plotly := get_plotlyjs()) == 1
    assert not re.search(r"@import|url\(|https?://", text.replace(plotly, ""))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(attrs["content"] for _, attrs in tags if attrs.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    assert str(policy).endswith(f"script-src 'sha256-{digest}'")
    figures = [attrs["data-figure"] for _, attrs in tags if "data-figure" in attrs]
    assert len(figures) == (4 if subject.is_run else 1)
    for figure in figures:
        Figure(json.loads(re.sub('"--[a-z]+"', '"#123456"', figure or "")))


def hostile_plan():
    plan = golden_plan()
    frozen, rejected = plan.frozen, (Rejected(choice=HOSTILE, reason=HOSTILE),)
    work = frozen.workload
    frozen = frozen.changed(
        hardware=frozen.hardware.changed(device_name=HOSTILE),
        workload=work.changed(model=work.model.changed(name=HOSTILE)),
        settings=frozen.settings.changed(attention=HOSTILE),
        reasons=(Reason(knob=HOSTILE, chosen=HOSTILE, why=HOSTILE, rejected=rejected),),
        advice=(HOSTILE,),
        forecast=None,
    )
    return Subject(HOSTILE, plan.changed(frozen=frozen))


def test_texts_become_no_markup():
    run = run_subject(prompt=HOSTILE.replace("\x00", ""))
    report = run.report.changed(warnings=(HOSTILE,))
    run = replace(run, name=HOSTILE, notes=(HOSTILE,), report=report)
    found = Outline(b"".join(build_page([hostile_plan(), run], "0.1.0")).decode())
    assert [attrs.get("class") for _, attrs in found.tags].count("subject") == 2
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert not [attrs for _, attrs in found.tags if any(name.startswith("on") for name in attrs)]
    assert not [attrs for tag, attrs in found.tags if tag == "img" and attrs["src"] == "x"]
    assert "</title><script>window.hacked = 1</script>" in found.text, "it is shown as text"
    assert not {"\u202e", "\x00"} & set(found.text), "and turns no writing around"


@pytest.mark.parametrize("name", ["wall", "known", "measured"])
def test_points_are_the_plan_s(name):
    plan = golden_plan(name)
    expected, points, settings = plan.frozen.expected, points_of(plan), plan.frozen.settings
    assert chosen_of(points).images_per_second == pytest.approx(expected.images_per_second)
    assert chosen_of(points).run_memory_bytes == expected.run_memory_bytes
    ran = {trial.candidate for trial in plan.frozen.trials if trial.outcome == "ok"}
    known = {kind: [p for p in points if p.kind == kind] for kind in ("measured", "failed")}
    assert {settings.changed(**p.changes) for p in known["measured"]} == ran | {settings}
    failed = {trial.candidate for trial in plan.frozen.trials if trial.outcome == "oom"}
    assert {settings.changed(**p.changes) for p in known["failed"]} == failed
    for point in points:
        beaten = any(
            other.images_per_second >= point.images_per_second
            and other.run_memory_bytes < point.run_memory_bytes
            for other in points
            if other.runs
        )
        assert not (point.is_front and beaten)
