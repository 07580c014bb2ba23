"""One device, one search: by real processes."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from autotune.errors import AutotuneError
from autotune.hardware.device_lock import DeviceLock, held_for_run, lock_path
from autotune.hardware.nvidia import DriverSource
from tests.builders import hardware

SPAWN = multiprocessing.get_context("spawn")


def _hold(path: Path, pipe: Connection, trains: bool, told: Path | None) -> None:
    waits: list[str] = []

    def tell(words: str) -> None:
        waits.append(words)
        if told is not None:
            told.touch()

    lock = DeviceLock(path, tell, trains=trains)
    lock.take()
    pipe.send(waits)
    pipe.recv()
    lock.give_back()


def _holder(
    path: Path, *, trains: bool = False, told: Path | None = None
) -> tuple["multiprocessing.process.BaseProcess", Connection]:
    """A process that takes the lock; `told` appears when it begins to wait."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_hold, args=(path, theirs, trains, told), daemon=True)
    process.start()
    return process, ours


def _until_wanted(lock: DeviceLock) -> None:
    deadline = time.monotonic() + 60  # a process may take long to start on a busy machine
    while not lock.is_wanted() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_the_second_search_is_told_whom_it_waits_for_and_runs_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks" / "device.lock"
    first, pipe = _holder(path)
    assert pipe.recv() == []
    with monkeypatch.context() as patch:
        patch.setattr("autotune.hardware.device_lock.LONGEST_WAIT_SECONDS", 0.1)
        with pytest.raises(AutotuneError, match=f"process {first.pid}") as refused:
            DeviceLock(path).take()
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


def test_runs_share_a_device_and_a_search_is_told_whose_run_has_it(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    run, pipe = _holder(path, trains=True)
    assert pipe.recv() == []
    with pytest.raises(AutotuneError, match=rf"training run \(process {run.pid} of ") as refused:
        DeviceLock(path).take()
    assert "--resume" in refused.value.hint
    beside = DeviceLock(path, trains=True)
    beside.take()
    pipe.send("end")
    run.join(10)
    with pytest.raises(AutotuneError, match=f"process {os.getpid()} of "):
        DeviceLock(path).take()
    beside.give_back()
    search = DeviceLock(path)
    search.take()
    search.give_back()


def test_a_run_waits_for_the_end_of_a_search_and_never_takes_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits = tmp_path / "device.lock", []
    search = DeviceLock(path)
    search.take()
    impatient = DeviceLock(path, waits.append, trains=True)
    with monkeypatch.context() as patch:
        patch.setattr("autotune.hardware.device_lock.LONGEST_WAIT_SECONDS", 0.1)
        with pytest.raises(AutotuneError, match=f"process {os.getpid()}"):
            impatient.take()
    assert "waiting for its end" in waits[0]
    told = tmp_path / "told"
    run, pipe = _holder(path, trains=True, told=told)
    deadline = time.monotonic() + 60
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    assert not search.is_wanted()
    assert not pipe.poll(0)
    search.give_back()
    assert pipe.poll(60)
    assert f"process {os.getpid()}" in pipe.recv()[0]
    pipe.send("end")
    run.join(10)


def test_a_run_of_several_processes_holds_all_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = hardware().device
    with held_for_run(gpu, 2, print):
        for index in (0, 1):
            with pytest.raises(AutotuneError, match="training run"):
                DeviceLock(lock_path(gpu.model_copy(update={"index": index}))).take()
        DeviceLock(lock_path(gpu.model_copy(update={"index": 2}))).take()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        with held_for_run(gpu, 2, print):
            pass  # one of its processes: nothing to wait for
    DeviceLock(lock_path(gpu)).take()


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


def test_a_card_has_one_lock_whichever_cards_a_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    first = hardware().device
    second = first.model_copy(update={"index": 1})

    def locks(*visible: str) -> list[Path]:
        monkeypatch.setattr(DriverSource, "uuid", lambda driver, index: visible[index])
        return [lock_path(device) for device in (first, second)[: len(visible)]]

    both, one, other = locks("card-a", "card-b"), locks("card-a"), locks("card-b")
    assert [*one, *other] == both
    assert one != other


def test_a_cache_that_cannot_be_written_does_not_keep_a_processor_from_being_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = hardware(kind="cpu").device
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert lock_path(cpu).is_relative_to(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lock_path(cpu).parent == Path(tempfile.gettempdir())


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "a.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(AutotuneError, match="cannot be opened"):
        DeviceLock(tmp_path / "a.lock").take()
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "device.lock").mkdir()
    with pytest.raises(AutotuneError, match=r"device\.lock") as refused:
        DeviceLock(tmp_path / "device.lock").take()
    assert "delete" in refused.value.hint
