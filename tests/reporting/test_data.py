"""The dataset check in 80 columns."""

from autotune.reporting.data import TITLES, data_report_lines
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.check import DataReport
from autotune.data.items import Problem
from autotune.reporting.text import WIDTH
from autotune.schema.workload import Bucket

REPORT = DataReport(
    folder="photos",
    resolution_px=1024,
    num_usable=18,
    epoch_size=18,
    num_unverified=0,
    num_with_controls=0,
    problems=(
        Problem(
            file="a.png", kind="broken", message="a.png cannot be decoded: image file is truncated"
        ),
        Problem(file="b.png", kind="captionless", message="has no caption"),
    ),
    buckets=(
        Bucket(width_px=832, height_px=1216, num_frames=1, num_items=6),
        Bucket(width_px=1024, height_px=1024, num_frames=1, num_items=12),
    ),
    num_enlarged=2,
    cropped=("a.png", "b.png", "c.png", "d.png"),
    caption_words=(3, 12, 40),
)


def test_the_report_reads_as_a_person_would_write_it() -> None:
    assert data_report_lines(REPORT) == [
        "photos: 18 usable image(s), cannot be trained on: 1 more without a caption",
        "  captions of 3 to 40 words, median 12",
        "",
        "Shapes at 1024 px",
        "    832 x 1216       6",
        "   1024 x 1024      12",
        "  2 scaled up more than 1.5x: use larger originals or less resolution",
        "  4 cropped by more than 25% of the area: a.png, b.png, c.png, ... and 1 more",
        "",
        "1 without a caption (write NAME.txt, or give --caption or --trigger)",
        "  b.png: has no caption",
        "",
        "1 broken, left out",
        "  a.png: a.png cannot be decoded: image file is truncated",
    ]


def test_long_lists_are_capped_and_say_so() -> None:
    problems = tuple(
        Problem(file=f"{n}.png", kind="tiny", message="is 8 x 8 px") for n in range(500)
    )
    buckets = tuple(
        Bucket(width_px=64 + n, height_px=64, num_frames=1, num_items=1) for n in range(50)
    )
    lines = data_report_lines(REPORT.model_copy(update={"problems": problems, "buckets": buckets}))
    assert "  ... and 480 more: --json names all" in lines
    assert "  ... and 30 more shapes: --json lists all" in lines
    assert len(lines) < 60


@given(st.text(), st.text(), st.sampled_from(sorted(TITLES)))
def test_no_file_name_reaches_the_terminal_raw_and_only_a_long_word_leaves_the_columns(
    folder: str, file: str, kind: str
) -> None:
    problem = Problem.model_validate({"file": file, "kind": kind, "message": file * 3})
    lines = data_report_lines(REPORT.model_copy(update={"folder": folder, "problems": (problem,)}))
    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= WIDTH or " " not in line.strip() for line in lines)


def test_every_kind_of_problem_has_a_title() -> None:
    from typing import get_args

    from autotune.data.items import ProblemKind

    assert set(TITLES) == set(get_args(ProblemKind))
