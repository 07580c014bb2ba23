"""`report`: where it writes, and what it makes of folders that somebody else filled."""

import base64
import random
import tracemalloc
from pathlib import Path

import pytest
from PIL import Image

import autotune
from autotune.errors import InvalidInput
from autotune.events import Notice, PhaseStarted, PreviewsWritten
from autotune.plan.file import MARK, RUN_PLAN_FILE, save_plan, with_job
from autotune.report.bug import VERSIONS, write_archive
from autotune.report.files import MAX_PREVIEWS, RunPage, read_run
from autotune.report.run import PAGE_FILE
from autotune.system.files import require_writable
from tests.report.page.pages import FOLDER, HOSTILE, golden_plan, run_report, steps_of
from tests.report.page.test_page import Outline

PLAN = Path(FOLDER) / "wall.yaml"


def noise(path, side_px=64):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.Random(0).randbytes(3 * side_px**2)
    Image.frombytes("RGB", (side_px, side_px), pixels).save(path, format="PNG")


def run_folder(folder, plan=None):
    plan = plan or with_job(golden_plan(), preview_prompts=("a red heart",))
    folder.mkdir()
    save_plan(plan, folder / RUN_PLAN_FILE)
    lines = [step.model_dump_json() + "\n" for step in steps_of(100)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step in (25, 50):
        noise(folder / f"previews/step-{step:06}-0.png")
    (folder / "report.json").write_text(run_report(plan).model_dump_json())
    for adapter in ("with", "without"):
        noise(folder / f"sample_{adapter}_adapter.png")
    return folder


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "run")


def test_run_page_lies_in_its_folder(run):
    assert autotune.report(run) == run / PAGE_FILE
    text = (run / PAGE_FILE).read_text()
    assert text.count('<img src="data:image/') == 4
    assert len(text) < 8e6


def test_long_runs_take_little_more_memory(run):
    lines = [step.model_dump_json() + "\n" for step in steps_of(6000, 6000)]
    (run / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    page = autotune.report(run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "step 6000: " in page.read_text()
    assert peak < 13e6


def test_damaged_folder_has_a_page(run):
    (run / "report.json").write_text("{")
    (run / "metrics.jsonl").write_text("nothing\n")
    (run / "previews/step-000025-0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (run / "previews/step-000030-0.png").mkdir()
    text = autotune.report(run).read_text()
    assert "report.json cannot be read" in text
    assert "step-000025-0.png cannot be shown" in text
    assert "step-000030-0.png cannot be shown" in text
    assert "metrics.jsonl is damaged in line 1" in text
    assert "no step has been taken yet" not in text


@pytest.mark.parametrize("linked", ["previews", "sample_with_adapter.png"])
def test_no_linked_picture_is_shown(run, tmp_path, linked):
    moved = (run / linked).rename(tmp_path / "private")
    (run / linked).symlink_to(moved)
    found = read_run(run)
    assert (len(found.previews), len(found.comparisons)) == ((0, 1) if moved.is_dir() else (2, 0))


@pytest.mark.parametrize("damage", [b"\x00\xff\x80" * 99, b'{"loss": NaN}\n', b'{"step": 101\n{}'])
def test_unreadable_steps_are_named(run, damage):
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + damage)
    told = "metrics.jsonl is damaged in line 101: no step from there on is known."
    assert read_run(run).notes == [told]


def test_a_killed_run_is_not_damaged(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 101, "lo')
    assert read_run(run).notes == []
    metrics.unlink()
    (run / "report.json").unlink()
    assert read_run(run).notes == []
    assert "no step has been taken yet" in autotune.report(run).read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step-1/state.pt"])
def test_page_replaces_no_file_of_run(run, name):
    before = (run / name).read_bytes() if (run / name).exists() else None
    for subject in (run, PLAN):
        with pytest.raises(InvalidInput, match="one of the files of the run"):
            autotune.report(subject, path=run / name)
    assert ((run / name).read_bytes() if (run / name).exists() else None) == before


def test_outputs_replace_only_their_kind(run, tmp_path):
    (file := tmp_path / "a.txt").write_text("a dog")
    for write in (
        lambda: autotune.plan("flux1-dev", hardware="4090", path=file),
        lambda: autotune.report(run, path=file),
        lambda: write_archive({}, file),
    ):
        with pytest.raises(InvalidInput, match="no earlier file of this command"):
            write()
    assert file.read_text() == "a dog"
    require_writable(run / RUN_PLAN_FILE, MARK)
    for _ in range(2):
        write_archive({VERSIONS: "1"}, tmp_path / "bug.zip")


def test_a_picture_is_encoded_anew(run):
    picture = run / "previews/step-000025-0.png"
    picture.write_bytes(picture.read_bytes() + b"<script>appended</script>")
    _, _, kept = read_run(run).previews[0]
    start, _, content = kept.source.partition(",")
    assert b"appended" not in base64.b64decode(content)
    assert (start, kept.width, kept.height) == ("data:image/png;base64", 64, 64)


def test_pictures_stay_within_bounds(run, monkeypatch):
    for step in range(1, 100):
        noise(run / f"previews/step-{step:06}-0.png", 8)
    (run / "previews/step-000001-9999999.png").write_bytes(b"")
    Image.new("L", (5000, 5000)).save(run / "previews/step-000003-0.png", format="PNG")
    subject = read_run(run)
    assert len(subject.previews) in (MAX_PREVIEWS - 1, MAX_PREVIEWS)
    assert {subject.previews[0][1], subject.previews[-1][1]} == {1, 99}
    assert all(max(picture[1:]) <= 320 for _, _, picture in subject.previews)
    few = read_run(run, picture_bytes=1000)
    assert sum(len(picture.source) for _, _, picture in few.previews) < 1000
    assert any("left out" in note for note in few.notes)


def test_page_survives_its_own_failure(run):
    seen = []
    page = RunPage(run, seen.append, clock=lambda: 0.0)
    page(PhaseStarted(name="training"))
    assert not (run / PAGE_FILE).exists()
    assert not page.has_trained
    page(steps_of(1)[0])
    page(PreviewsWritten(step=25))
    assert page.has_trained
    assert (run / PAGE_FILE).exists()
    (run / RUN_PLAN_FILE).write_text("damaged")
    page(PreviewsWritten(step=50))
    assert len(seen) == 4 + 1
    (notice,) = [event for event in seen if isinstance(event, Notice)]
    assert (notice.level, notice.text.startswith("no report.html: ")) == ("warning", True)


def test_hostile_folder_adds_no_markup(tmp_path):
    plan = with_job(golden_plan(), preview_prompts=(HOSTILE.replace("\x00", ""),))
    run = run_folder(tmp_path / "<script>alert(1)<", plan)
    report = run_report(plan).changed(warnings=(HOSTILE,))
    (run / "report.json").write_text(report.model_dump_json())
    page = Outline(autotune.report(run).read_text())
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert {str(attrs["src"])[:11] for tag, attrs in page.tags if tag == "img"} == {"data:image/"}
    assert not [attrs for _, attrs in page.tags if "onerror" in attrs]
    assert "<script>alert(1)<" in page.text
