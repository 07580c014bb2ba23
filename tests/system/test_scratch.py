"""Temporary folders of killed processes go when the next one makes any; those of living ones
stay."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from autotune.system.files import MIN_AGE_SECONDS, make_scratch_folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grow_old(folder: Path) -> None:
    then = time.time() - 2 * MIN_AGE_SECONDS
    os.utime(folder, (then, then))


def made_by_a_child() -> tuple[int, Path]:
    """A process that waits beside its folder."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        folder = make_scratch_folder("test")
        (Path(folder.name) / "file").write_text("left")
        os.write(writing, folder.name.encode())
        signal.pause()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return child, Path(os.fsdecode(pipe.read1(4096)))


def test_what_a_killed_process_leaves_goes_and_what_a_living_one_has_stays() -> None:
    child, left = made_by_a_child()
    grow_old(left)
    with make_scratch_folder("test") as own:
        assert (left / "file").exists(), "its process lives"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        grow_old(Path(own))
        make_scratch_folder("test").cleanup()
        assert not left.exists()
        assert Path(own).is_dir()
    assert not Path(own).exists()


def test_only_old_folders_go_never_links_or_anything_else(place: Path) -> None:
    target = place / "precious"
    target.mkdir()
    (place / "autotune-scratch-link").symlink_to(target)
    (place / "autotune-scratch-file").write_text("")
    young = place / "autotune-scratch-young"
    young.mkdir()
    for path in (target, place / "autotune-scratch-file"):
        grow_old(path)
    make_scratch_folder("test").cleanup()
    assert target.is_dir()
    assert young.is_dir(), "it may not be locked yet"
    assert (place / "autotune-scratch-file").exists()
