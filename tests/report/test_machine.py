"""Text about machines and data: no name reaches the terminal raw."""

import math
from typing import get_args

from hypothesis import given, settings, strategies as st

from autotune.api import list_models
from autotune.data.dataset import DataReport
from autotune.data.media import Problem, ProblemKind
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.probe import read_profile
from autotune.plan.workload import Bucket
from autotune.report.machine import PROBLEMS, data_report_lines, profile_lines
from autotune.report.predictions import model_lines
from tests.machine.fleet import MACHINES, machine


def test_probes_fit_twelve_lines():
    for name in MACHINES:
        found = findings(read_doctor_facts(machine(name)))
        assert len(profile_lines(read_profile(machine(name)), found)) <= 12


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


@settings(max_examples=40)
@given(st.text(), st.text(), st.sampled_from(sorted(PROBLEMS)))
def test_file_names_are_printable(folder, file, kind):
    assert set(PROBLEMS) == set(get_args(ProblemKind))
    problem = Problem.model_validate({"file": file, "kind": kind, "message": file * 3})
    lines = data_report_lines(REPORT.model_copy(update={"folder": folder, "problems": (problem,)}))
    assert all(line.isprintable() for line in lines)
