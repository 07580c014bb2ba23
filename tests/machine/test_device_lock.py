"""One device, one search: by real processes."""

import multiprocessing
import os
import signal
import tempfile
import time

import pytest

from autotune.errors import AutotuneError
from autotune.machine.lock import DeviceLock, lock_for_run, lock_path
from autotune.machine.sources import DriverSource
from tests.builders import hardware

FORK = multiprocessing.get_context("fork")


def _hold(path, pipe, for_training):
    waits = []
    lock = DeviceLock(path, waits.append, for_training=for_training)
    pipe.recv()
    lock.acquire()
    pipe.send(waits)
    pipe.recv()
    lock.release()


def _holder(path, *, for_training=False):
    """A process that takes the lock when it is sent a word, and keeps it until the next. It is
    forked, so this process must hold no lock yet."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(path, theirs, for_training), daemon=True)
    process.start()
    return process, ours


def _await_waiting_search(lock):
    deadline = time.monotonic() + 60
    while not lock.has_waiting_search() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "locks" / "device.lock"


def test_second_search_names_holder_and_waits(path, monkeypatch):
    (first, pipe), (second, other) = _holder(path), _holder(path)
    pipe.send("take it")
    assert pipe.recv() == []
    with monkeypatch.context() as patch:
        patch.setattr("autotune.machine.lock.MAX_WAIT_SECONDS", 0.1)
        with pytest.raises(AutotuneError, match=f"process {first.pid}") as refused:
            DeviceLock(path).acquire()
    assert refused.value.hint
    other.send("take it")
    _await_waiting_search(DeviceLock(path))
    assert not other.poll(0)
    pipe.send("end")
    assert str(first.pid) in other.recv()[0]
    other.send("end")
    for process in (first, second):
        process.join(60)


def test_searches_take_turns(path):
    """Two that wait for each other's results must both come forward."""
    other, pipe = _holder(path)
    lock = DeviceLock(path)
    lock.acquire()
    assert not lock.has_waiting_search()
    pipe.send("take it")
    _await_waiting_search(lock)
    lock.release()
    assert len(pipe.recv()) == 1  # it was given the lock before we could take it again
    pipe.send("end")
    lock.acquire()
    other.join(60)
    lock.release()


def test_runs_share_device_and_refuse_searches(path):
    run, pipe = _holder(path, for_training=True)
    pipe.send("take it")
    assert pipe.recv() == []
    with pytest.raises(AutotuneError, match=rf"training run \(process {run.pid} of ") as refused:
        DeviceLock(path).acquire()
    assert "--resume" in refused.value.hint
    second_run = DeviceLock(path, for_training=True)
    second_run.acquire()
    pipe.send("end")
    run.join(60)
    with pytest.raises(AutotuneError, match=f"process {os.getpid()} of "):
        DeviceLock(path).acquire()
    second_run.release()
    search = DeviceLock(path)
    search.acquire()
    search.release()


def test_a_run_locks_all_its_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = hardware().device
    with lock_for_run(gpu, 2, print):
        for index in (0, 1):
            with pytest.raises(AutotuneError, match="training run"):
                DeviceLock(lock_path(gpu.changed(index=index))).acquire()
        DeviceLock(lock_path(gpu.changed(index=2))).acquire()
        with lock_for_run(gpu, 2, print):
            pass  # runs share their devices' locks
    DeviceLock(lock_path(gpu)).acquire()


def test_a_killed_holder_leaves_no_lock(path):
    holder, pipe = _holder(path)
    pipe.send("take it")
    pipe.recv()
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join(60)
    started = time.monotonic()
    lock = DeviceLock(path)
    lock.acquire()
    lock.acquire()  # held already: nothing to wait for
    lock.release()
    assert time.monotonic() - started < 20


def test_cards_have_one_lock(monkeypatch):
    first, cpu = hardware().device, hardware(kind="cpu").device

    def locks(*visible):
        monkeypatch.setattr(DriverSource, "uuid", lambda driver, index: visible[index])
        return [lock_path(first.changed(index=index)) for index in range(len(visible))]

    both, one, other = locks("card-a", "card-b"), locks("card-a"), locks("card-b")
    assert [*one, *other] == both
    assert len({*both, lock_path(cpu)}) == 3


def test_links_and_folders_are_no_locks(tmp_path):
    (tmp_path / "precious").write_text("unchanged")
    (tmp_path / "a.lock").symlink_to(tmp_path / "precious")
    (tmp_path / "b.lock").mkdir()
    for name in ("a.lock", "b.lock"):
        with pytest.raises(AutotuneError, match=f"{name}, cannot be opened") as refused:
            DeviceLock(tmp_path / name).acquire()
        assert "delete" in refused.value.hint
    assert (tmp_path / "precious").read_text() == "unchanged"
