"""What is shown of machines, models and data: no name reaches the terminal raw, and the numbers are
the objects'."""

import io
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autotune.api.machines import list_models
from autotune.data.check import DataReport
from autotune.data.items import Problem, ProblemKind
from autotune.errors import InvalidInput
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.probe import read_profile
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import Rate
from autotune.plan.workload import Bucket
from autotune.report.machine import PROBLEMS, data_report_lines, findings_view, profile_view
from tests.conftest import autotune_here
from tests.machine.fleet import MACHINES, machine

REPORT = DataReport(
    folder="photos",
    resolution_px=1024,
    num_usable=18,
    epoch_size=18,
    num_unverified=0,
    num_with_controls=0,
    problems=(),
    buckets=(Bucket(width_px=832, height_px=1216, num_frames=1, num_items=6),),
    num_enlarged=2,
    cropped=("a.png", "b.png", "c.png", "d.png"),
    caption_words=(3, 12, 40),
)


def test_every_kind_of_problem_is_told_and_long_lists_are_capped() -> None:
    assert set(PROBLEMS) == set(get_args(ProblemKind))
    problems = tuple(
        Problem(file=f"{n}.png", kind="tiny", message="is 8 x 8 px") for n in range(500)
    )
    lines = data_report_lines(REPORT.model_copy(update={"problems": problems}))
    assert lines[0].startswith("photos: 18 usable")
    assert any("480 more" in line for line in lines)
    assert len(lines) < 60


@given(st.text(), st.text(), st.sampled_from(sorted(PROBLEMS)))
def test_no_file_name_reaches_the_terminal_raw(folder: str, file: str, kind: str) -> None:
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
def test_a_profile_and_findings_are_shown_whole(name):
    profile = read_profile(machine(name)).changed(
        rates=(rate(1.4e14, "FLOP/s"),), notes=("a [b] note",), noisy=True
    )
    text = shown(profile_view(profile))
    for needed in (
        profile.device.memory_kind,
        "noisy",
        "140.0 TFLOP/s",
        "a [b] note",
        "torchao-int8",
    ):
        assert needed in text
    assert "None" not in text
    found = findings(read_doctor_facts(machine(name), 2**36))
    assert shown(findings_view(found)).count("fix:") == len(found)


def test_models_are_given_as_json_and_an_unknown_gpu_is_refused(capfd):
    process = autotune_here(capfd, "models", "--hardware", "4090", "--json")
    assert process.returncode == 0
    found = {model["name"]: model for model in json.loads(process.stdout)}
    assert len(found) == sum(len(family.models) for family in FAMILIES.values())
    assert found["flux1-dev"]["prediction"]["gpu"] == "nvidia-rtx-4090"
    with pytest.raises(InvalidInput):
        list_models("4091")
