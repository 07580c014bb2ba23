"""The record of a run and its trackers: what is kept through kills, damage and failures."""

import shutil
import threading

import pytest
from PIL import Image

from autotune.train.metrics import Metrics, read_metrics
from tests.train.small import finished_step

HUGE = finished_step(2).changed(seconds=1e308).model_dump_json().encode() + b"\n"


DAMAGES = (
    b"\xff\n", b"\0" * 40, b'{"step": "2"}\n', b"null\n", b"[" * 9999, b"NaN\n", b" " * (1 << 17),
    HUGE, HUGE.replace(b"1e308", b"1e999"), HUGE.replace(b"1e308", b"NaN"),
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_record_ends_where_damage_begins(tmp_path, damage):
    first = Metrics(tmp_path, resumed_at=0, report_to="none")
    first.add(finished_step(1))
    first.close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + damage + whole)
    Metrics(tmp_path, resumed_at=3, report_to="none").close()
    assert path.read_bytes() == whole


# Python would print a traceback.
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_there", [True, False])
def test_unwritable_curves_end_no_run(tmp_path, is_there):
    """The folder vanishes, or was a file: TensorBoard's thread raises at one of the next points."""
    warnings: list[str] = []
    curves = tmp_path / "tensorboard"
    if not is_there:
        curves.write_text("")
    before = set(threading.enumerate())
    metrics = Metrics(tmp_path, resumed_at=0, report_to="tensorboard", on_warning=warnings.append)
    metrics.add(finished_step(1))
    if is_there:
        while curves.exists():  # TensorBoard's thread may write into it meanwhile
            shutil.rmtree(curves, ignore_errors=True)
    metrics.add(finished_step(2))
    metrics.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # what it raises later would be the next test's
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert len(warnings) <= 1
    assert all("no more curves" in warning for warning in warnings)


def test_killed_records_are_continued(tmp_path):
    first = Metrics(tmp_path, resumed_at=0, report_to="none")
    for step in (1, 2, 3):
        first.add(finished_step(step))
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "nu')
    second = Metrics(tmp_path, resumed_at=2, report_to="none")
    second.add(finished_step(3))
    second.close()
    assert read_metrics(path) == [finished_step(1), finished_step(2), finished_step(3)]
    assert second.losses == [1.0, 0.5, 1 / 3]


def test_wandb_keeps_curves_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    picture = tmp_path / "preview.png"
    Image.new("RGB", (32, 32), "red").save(picture)
    told: list[str] = []
    metrics = Metrics(tmp_path, resumed_at=0, report_to="wandb", on_warning=told.append)
    for step in (1, 2):
        metrics.add(finished_step(step))
    metrics.add_previews(2, [picture])
    metrics.close()
    assert told == []
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 0
    assert len(list(log.parent.glob("files/media/images/preview 1_2_*.png"))) == 1
