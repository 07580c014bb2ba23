"""Writing whole or not at all, and never over what is no file."""

import errno
import os
import stat
from pathlib import Path

import pytest

from autotune.system.files import read_bounded, require_writable, write_text_atomic


def test_only_files_are_replaced(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for place in (pipe, folder):
        for write in (require_writable, lambda path: write_text_atomic(path, "text")):
            with pytest.raises(OSError, match="not a regular file"):
                write(place)
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [folder, pipe]


def test_asking_whether_a_file_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "plan.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_syncs_no_folders_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_reading_never_waits_never_goes_on_and_never_fills_memory(tmp_path: Path) -> None:
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
