"""Files are whole or absent, untrusted ones bounded; scratch folders go; URLs tell no password."""

import errno
import os
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.system.files import (
    MIN_AGE_SECONDS,
    describe_url,
    make_scratch_folder,
    quote_error,
    read_bounded,
    require_writable,
    write_text_atomic,
)


def test_only_files_are_replaced(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for place in (pipe, folder):
        for write in (require_writable, lambda path: write_text_atomic(path, "text")):
            with pytest.raises(OSError, match="not a regular file"):
                write(place)
    assert pipe.is_fifo()
    require_writable(tmp_path / "plan.yaml")
    assert sorted(tmp_path.iterdir()) == [folder, pipe]


def test_folders_need_not_sync(tmp_path, monkeypatch):
    """As on some network file systems."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_reading_is_bounded(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(20 << 30)
    for name, reason in {
        "pipe": "not a regular file",
        "zero": "not a regular file",
        ".": "not a regular file",
        "loop": os.strerror(errno.ELOOP),
        "sparse": "larger than the 1 KiB",
        "absent": os.strerror(errno.ENOENT),
    }.items():
        with pytest.raises(OSError, match=reason) as caught:
            read_bounded(tmp_path / name, 1024)
        assert caught.value.strerror
    (tmp_path / "whole").write_bytes(bytes(1024))
    assert read_bounded(tmp_path / "whole", 1024) == bytes(1024)


@pytest.fixture
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


@pytest.mark.usefixtures("place")
def test_folders_of_killed_processes_go():
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


def test_links_files_and_young_folders_stay(place):
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


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://team/profiles", "s3://team/profiles"),
        ("postgresql+psycopg://me:hunter2@host:5432/db", "postgresql+psycopg://***@host:5432/db"),
        ("https://me:[hunter2@host/x", "https://***@host/x"),
        ("https://host/x?token=hunter2", "https://host/x***"),
        ("https://host/x;token=hunter2?a", "https://host/x***"),
        ("https://me:p@hunter2@host/x", "https://***"),
        ("https://me:p#hunter2@host/x", "https://***"),
        ("https:/me:hunter2@host/x", "***"),
        ("me:hunter2@host/x", "***"),
        ("hunter2", "***"),
    ],
)
def test_only_safe_parts_are_shown(url, shown):
    assert describe_url(url) == shown


MARKS = st.text(alphabet="@:/?#;=&%[] ", max_size=4)


@given(
    st.lists(MARKS, min_size=5, max_size=5),
    st.sampled_from(["https://", "https:/", "s3://", "", "postgresql://"]),
)
def test_no_password_is_shown(marks, scheme):
    first, second, third, fourth, fifth = marks
    url = f"{scheme}{first}me{second}:{third}{SECRET}{fourth}@{fifth}host/db"
    assert SECRET not in describe_url(url)
    assert SECRET not in quote_error(OSError(f"cannot reach {SECRET}"), url)
