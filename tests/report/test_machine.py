"""Text about machines and data: no name reaches the terminal raw."""

import io
import math
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from autotune.api import list_models
from autotune.data.dataset import DataReport
from autotune.data.media import Problem, ProblemKind
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.probe import read_profile
from autotune.plan.hardware import Rate
from autotune.plan.workload import Bucket
from autotune.report.machine import (
    PROBLEMS,
    data_report_lines,
    findings_lines,
    profile_lines,
    profile_view,
)
from autotune.report.predictions import model_lines
from tests.machine.fleet import MACHINES, machine


def test_models_are_sorted_by_hours():
    models = list_models("4090")
    hours = [model.run_hours or math.inf for model in models]
    assert hours == sorted(hours)
    first = models[0]
    assert first.prediction is not None
    assert first.image_seconds == (first.prediction.step_seconds or 0) / first.effective_batch_size
    lines = model_lines(models, "4090")
    assert max(map(len, lines)) <= 80
    unfit = any(model.run_hours is None for model in models)
    assert any("autotune compare --model" in line for line in lines) == unfit


REPORT = DataReport(
    folder="photos", resolution_px=1024, num_usable=18, epoch_size=18, num_unverified=0,
    num_with_controls=0, problems=(),
    buckets=(Bucket(width_px=832, height_px=1216, num_frames=1, num_items=6),),
    enlarged=("a.png", "b.png"), cropped=("a.png", "b.png", "c.png", "d.png"),
    caption_words=(3, 12, 40),
)  # fmt: skip


def test_problems_are_reported_and_capped():
    assert set(PROBLEMS) == set(get_args(ProblemKind))
    tiny = {"kind": "tiny", "message": "is 8 x 8 px"}
    problems = tuple(Problem(file=f"{number}.png", **tiny) for number in range(500))
    lines = data_report_lines(REPORT.model_copy(update={"problems": problems}))
    assert lines[0].startswith("photos: 18 usable")
    assert any("480 more" in line for line in lines)
    assert len(lines) < 60


@settings(max_examples=40)
@given(st.text(), st.text(), st.sampled_from(sorted(PROBLEMS)))
def test_file_names_are_printable(folder, file, kind):
    problem = Problem.model_validate({"file": file, "kind": kind, "message": file * 3})
    lines = data_report_lines(REPORT.model_copy(update={"folder": folder, "problems": (problem,)}))
    assert all(line.isprintable() for line in lines)


def shown(view):
    console = Console(width=80, record=True, file=io.StringIO(), color_system=None)
    console.print(view)
    return console.export_text()


def rate(value, unit):
    return Rate(name="matmul.bf16.4096x3072", value=value, unit=unit, spread=0.04, num_samples=9)


@pytest.mark.parametrize("name", MACHINES)
def test_profiles_are_shown_whole(name):
    profile = read_profile(machine(name)).changed(
        rates=(rate(1.4e14, "FLOP/s"),), notes=("a [b] note",), noisy=True
    )
    text = shown(profile_view(profile))
    for needed in (profile.device.memory_kind, "noisy", "140.0 TFLOP/s", "a [b] note"):
        assert needed in text
    assert "None" not in text
    found = findings(read_doctor_facts(machine(name)))
    brief, told = profile_lines(profile, found), findings_lines(found)
    assert (len(brief) <= 12, max(map(len, (*brief, *told))) <= 80) == (True, True), brief
    assert sum(line.startswith("fix:") for line in told) == len(found)
