"""One device, one search: by real processes."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from autotune.errors import AutotuneError
from autotune.trials.lock import DeviceLock, lock_path
from tests.builders import hardware

SPAWN = multiprocessing.get_context("spawn")


def _hold(path: Path, pipe: Connection) -> None:
    waits: list[str] = []
    lock = DeviceLock(path, waits.append)
    lock.take()
    pipe.send(waits)
    pipe.recv()
    lock.give_back()


def _holder(path: Path) -> tuple["multiprocessing.process.BaseProcess", Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_hold, args=(path, theirs), daemon=True)
    process.start()
    return process, ours


def _until_wanted(lock: DeviceLock) -> None:
    deadline = time.monotonic() + 60  # a process may take long to start on a busy machine
    while not lock.is_wanted() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_the_second_search_is_told_whom_it_waits_for_and_runs_after_it(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "device.lock"
    first, pipe = _holder(path)
    assert pipe.recv() == []
    with pytest.raises(AutotuneError, match=f"process {first.pid}") as refused:
        DeviceLock(path, longest_wait_seconds=0.1).take()
    assert refused.value.hint
    second, other = _holder(path)
    _until_wanted(DeviceLock(path))
    assert not other.poll(0)
    pipe.send("end")
    assert str(first.pid) in other.recv()[0]
    other.send("end")
    for process in (first, second):
        process.join(10)


def test_searches_take_turns(tmp_path: Path) -> None:
    """Two that wait for each other's results must both come forward."""
    path = tmp_path / "device.lock"
    lock = DeviceLock(path)
    lock.take()
    assert not lock.is_wanted()
    other, pipe = _holder(path)
    _until_wanted(lock)
    lock.give_back()
    assert len(pipe.recv()) == 1  # it was given the lock before we could take it again
    pipe.send("end")
    lock.take()
    other.join(10)
    lock.give_back()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    holder, pipe = _holder(path)
    pipe.recv()
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join(10)
    started = time.monotonic()
    lock = DeviceLock(path)
    lock.take()
    lock.take()  # held already: nothing to wait for
    lock.give_back()
    assert time.monotonic() - started < 1


def test_each_device_has_its_own_lock() -> None:
    gpu, cpu = hardware().device, hardware(kind="cpu").device
    other = gpu.model_copy(update={"index": 1})
    assert len({lock_path(device) for device in (gpu, cpu, other)}) == 3


def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "device.lock").mkdir()
    with pytest.raises(AutotuneError, match=r"device\.lock") as refused:
        DeviceLock(tmp_path / "device.lock").take()
    assert "delete" in refused.value.hint
