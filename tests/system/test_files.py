"""Files are whole or absent, untrusted ones bounded; scratch folders go; URLs tell no password."""

import errno
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from autotune.system import files
from autotune.system.lazy import LazyModule
from autotune.system.memory import measure_peak_memory


def test_only_files_are_replaced(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for place in (pipe, folder):
        for write in (files.require_writable, lambda path: files.write_text_atomic(path, "text")):
            with pytest.raises(OSError, match="not a regular file"):
                write(place)
    assert pipe.is_fifo()
    files.require_writable(tmp_path / "plan.yaml")
    assert sorted(tmp_path.iterdir()) == [folder, pipe]


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
            files.read_bounded(tmp_path / name, 1024)
        assert caught.value.strerror
    (tmp_path / "whole").write_bytes(bytes(1024))
    assert files.read_bounded(tmp_path / "whole", 1024) == bytes(1024)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grow_old(folder):
    then = time.time() - 2 * files.MIN_AGE_SECONDS
    os.utime(folder, (then, then))


def made_by_a_child():
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        folder = files.make_scratch_folder("test")
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
    with files.make_scratch_folder("test") as own:
        assert (left / "file").exists(), "its process lives"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        grow_old(Path(own))
        files.make_scratch_folder("test").cleanup()
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
    files.make_scratch_folder("test").cleanup()
    assert target.is_dir()
    assert young.is_dir(), "it may not be locked yet"
    assert (place / "autotune-scratch-file").exists()


SECRET = "hunter2"


MARKS = st.text(alphabet="@:/?#;=&%[] ", max_size=4)


@given(
    st.lists(MARKS, min_size=5, max_size=5),
    st.sampled_from(["https://", "https:/", "s3://", "", "postgresql://"]),
)
def test_no_password_is_shown(marks, scheme):
    first, second, third, fourth, fifth = marks
    url = f"{scheme}{first}me{second}:{third}{SECRET}{fourth}@{fifth}host/db"
    assert SECRET not in files.describe_url(url)
    assert SECRET not in files.quote_error(OSError(f"cannot reach {SECRET}"), url)


def test_two_threads_get_whole_of_one(tmp_path, monkeypatch):
    """Of a library that notes its loads, and takes long enough for a second thread to come."""
    name, loads = "a_library_of_this_test", tmp_path / "loads"
    text = f"import time\nopen({str(loads)!r}, 'a').write('x')\ntime.sleep(0.1)\nVALUE = object()\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop(name, None)
    named, both, seen = LazyModule(name), threading.Barrier(2), []

    def use():
        both.wait()
        seen.append(named.VALUE)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [sys.modules[name].VALUE] * 2
    assert loads.read_text() == "x"


CPU = torch.device("cpu")


def test_measured_work_may_free_live_tensors():
    """Block swap does; a list of what was live before would keep one."""
    weights = [torch.zeros(4)]
    reference = weakref.ref(weights[0])

    def work():
        weights.clear()
        return reference() is None

    assert measure_peak_memory(CPU, lambda: list(weights), work)[0]
