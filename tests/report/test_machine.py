"""Text about machines and data: no name reaches the terminal raw."""

from typing import get_args

from hypothesis import given, strategies as st

from autotune.data.dataset import DataReport
from autotune.data.media import Problem, ProblemKind
from autotune.plan.workload import Bucket
from autotune.report.machine import PROBLEMS, data_report_lines

REPORT = DataReport(
    folder="photos",
    resolution_px=1024,
    num_usable=18,
    epoch_size=18,
    num_unverified=0,
    num_with_controls=0,
    problems=(),
    buckets=(Bucket(width_px=832, height_px=1216, num_frames=1, num_items=6),),
    enlarged=("a.png", "b.png"),
    cropped=("a.png", "b.png", "c.png", "d.png"),
    caption_words=(3, 12, 40),
)


@given(st.text(), st.text(), st.sampled_from(sorted(PROBLEMS)))
def test_file_names_are_printable(folder, file, kind):
    assert set(PROBLEMS) == set(get_args(ProblemKind))
    problem = Problem.model_validate({"file": file, "kind": kind, "message": file * 3})
    lines = data_report_lines(REPORT.model_copy(update={"folder": folder, "problems": (problem,)}))
    assert all(line.isprintable() for line in lines)
