"""The watch of a run, the process next to it, and its record: leaks, host memory, damage."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from autotune.errors import AutotuneError, InvalidInput, Preempted, reraise_oom
from autotune.train import monitor as watching, watchdog
from autotune.train.folder import checkpoints_of
from autotune.train.metrics import Metrics, read_metrics
from autotune.train.monitor import MemoryReading, Monitor
from autotune.train.watchdog import HostMemoryShort, Watchdog
from tests.builders import GIB
from tests.events import steps_to
from tests.train.conftest import CPU
from tests.train.small import finished_step

FULL = MemoryReading(0, 0, 20 * GIB, 0, 0.97)
ROOMY = MemoryReading(0, 0, 16 * GIB, 0, 0.7)


def told(readings, seconds=1.0, **known):
    monitor = Monitor(CPU, planned_seconds=1.0, **known)
    return [text for reading in readings for text in monitor.check(reading, seconds, 0.0)]


def test_leaks_are_told_once():
    steps = range(watching.WINDOW_STEPS * (watching.NUM_WINDOWS + 3))
    leak = [MemoryReading(8 * 10**8 + step * 2 * 10**5, 10**8) for step in steps]
    assert told(leak, budget_bytes=10**9) == ["memory grows by 0.19 MiB per step"]
    near = told([MemoryReading(1, 9 * 10**8)] * 3 + leak, budget_bytes=10**9)
    assert [text.split()[1] for text in near] == ["is", "grows"]
    assert "90% of what a run may take" in near[0]


def test_spills_are_told_once():
    (warning,) = told([FULL] * 3 * watching.SPILL_STEPS, seconds=6.0, can_spill=True)
    slow = "steps take 6.0 times what was planned: with 97% of the GPU's memory taken"
    assert warning.startswith(slow)
    assert "Prefer No Sysmem Fallback" in warning


@pytest.mark.parametrize(
    ("reading", "seconds", "can_spill"),
    [(FULL, 2.5, True), (ROOMY, 60.0, True), (FULL, 60.0, False)],
    ids=["a slower card", "something else is slow", "a driver that fails instead"],
)
def test_slow_steps_are_no_spill(reading, seconds, can_spill):
    assert told([reading] * 3 * watching.SPILL_STEPS, seconds, can_spill=can_spill) == []


def test_retries_are_recorded_and_survived(bench, tmp_path):
    readings = iter([ROOMY, *[replace(FULL, allocator_retries=1)] * 9])
    monitor = Monitor(CPU, read=lambda: next(readings))
    loop = bench.loop(bench.plan(num_steps=2), tmp_path, monitor=monitor)
    (warning,) = loop.warnings
    assert "the allocator ran out of memory and started over" in warning
    *_, row = read_metrics(tmp_path / "metrics.jsonl")
    assert (row.step, row.reserved_bytes, row.allocator_retries) == (2, 20 * GIB, 1)


def test_spikes_count_over_all_starts():
    monitor = Monitor(CPU)
    for _ in range(watching.MIN_SPIKE_STEPS - 1):
        monitor.add_gradient(1.0)
    monitor.add_gradient(50.0)  # too early to tell
    assert monitor.num_spikes == 0
    monitor.add_gradient(9.0)
    monitor.add_gradient(11.0)
    assert monitor.num_spikes == 1
    again = Monitor(CPU)
    again.load_gradient_state(json.loads(json.dumps(monitor.gradient_state())))
    again.add_gradient(11.0)
    assert again.num_spikes == 2


def growth(floors):
    found = watching.Growth()
    return [found.add(floor) for floor in floors for _ in range(watching.WINDOW_STEPS)][-1]


@given(st.integers(10**6, 10**9), st.tuples(*[st.integers(-5000, 5000)] * watching.NUM_WINDOWS))
def test_noise_is_no_leak(level, noise):
    is_large = max(noise) - min(noise) > level * 0.05
    assert growth(level + one for one in noise) == 0.0 or is_large


def test_previews_are_no_leak():
    windows, last = range(watching.NUM_WINDOWS), watching.NUM_WINDOWS - 1
    assert growth(950 + window + 30 * (window >= last) for window in windows) == 0.0
    assert growth(950 + 10 * window for window in windows) == 10 / watching.WINDOW_STEPS


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a phase's peak"
)
def test_nested_phases_count_apart():
    monitor = Monitor(CPU)
    with monitor.phase("outer"), monitor.phase("inner"):
        block = b"x" * (300 * 2**20)
        del block
    outer, inner = (monitor.peaks[name].host_bytes or 0 for name in ("outer", "inner"))
    assert inner - outer > 200 * 2**20


def test_only_short_memory_is_told_so():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError("cannot allocate")):
        with pytest.raises(AutotuneError, match="memory ran out") as told, reraise_oom():
            raise error
        assert "--reserve" in told.value.hint
    for other in (RuntimeError("shapes differ"), InvalidInput("out of memory?", hint="no")):
        with pytest.raises(type(other)) as raised, reraise_oom():
            raise other
        assert raised.value is other


PLENTY, SHORT = 100, 9
READER = """
import sys
from pathlib import Path
from autotune.train.watchdog import watch_parent
watch_parent(*map(int, sys.argv[1:4]), lambda: int(Path({path!r}).read_text() or 100))
"""
STUCK = """
import json, sys, time
from autotune.train import watchdog
watchdog.COMMAND = json.loads(sys.argv[1])
with watchdog.Watchdog(10, has_run=True) as watched, watched.finishing_steps():
    time.sleep(1)
    open(sys.argv[2], "w").write("1")
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def available(tmp_path, monkeypatch):
    path = tmp_path / "available"
    path.write_text(str(PLENTY))
    command = (sys.executable, "-c", READER.format(path=str(path)))
    monkeypatch.setattr(watchdog, "COMMAND", command)
    monkeypatch.setattr(Watchdog, "of_device", lambda kind: Watchdog(10, has_run=kind == "host"))
    return path


def test_a_short_host_gets_a_checkpoint(bench, tmp_path, available):
    plan = bench.plan(num_steps=400, checkpointing_steps=0, output=str(tmp_path / "out"))
    taken = []

    def take(event):
        taken.append(event.step)
        if event.step == 3:
            available.write_text(str(SHORT))

    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(HostMemoryShort, match="stopped by a shortage") as end:
        bench.train(plan, steps_to(take))
    assert (end.value.exit_status, "--resume" in end.value.hint) == (1, True)
    (checkpoint,) = checkpoints_of(tmp_path / "out")
    assert checkpoint.stem == f"checkpoint-{taken[-1]:06}"
    assert signal.getsignal(signal.SIGUSR2) == before


def test_listener_cancels_run_in_thread(bench, tmp_path):
    def cancel(event):
        raise KeyboardInterrupt

    plan = bench.plan(num_steps=400, checkpointing_steps=0, output=str(tmp_path / "out"))
    with ThreadPoolExecutor() as threads, pytest.raises(Preempted):
        threads.submit(bench.train, plan, steps_to(cancel)).result()
    assert [path.stem for path in checkpoints_of(tmp_path / "out")] == ["checkpoint-000001"]


def test_shortage_that_library_hides_is_told(available):
    def read():
        available.write_text(str(SHORT))
        try:
            time.sleep(60)
        except Exception as error:
            raise OSError("unreadable") from error

    with pytest.raises(HostMemoryShort, match="training was ended"), Watchdog.of_device("host"):
        read()


def test_guard_imports_no_torch():
    code = "import sys, autotune.train.watchdog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_orphaned_guards_spare_the_adopter(available):
    available.write_text("1")
    gone = str(os.getppid())
    ended = subprocess.run([*watchdog.COMMAND, gone, "10", "5"], timeout=60, check=False)
    assert ended.returncode == 0


def test_stuck_runs_are_killed(available):
    command = [sys.executable, "-c", STUCK, json.dumps(watchdog.COMMAND), str(available)]
    stuck = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert stuck.returncode == -signal.SIGKILL
    words = "error: 0 MiB of system RAM were left: training was ended at once\nhint: close other"
    assert stuck.stderr.startswith(words)


HUGE = finished_step(2).changed(seconds=1e308).model_dump_json().encode() + b"\n"


DAMAGES = (
    b"\xff\n",
    b"\0" * 40,
    b'{"step": "2"}\n',
    b"null\n",
    b"[" * 9999,
    b"NaN\n",
    b" " * (1 << 17),
    HUGE,
    HUGE.replace(b"1e308", b"1e999"),
    HUGE.replace(b"1e308", b"NaN"),
)


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
    warnings = []
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
    assert len([*read_metrics(tmp_path / "metrics.jsonl")]) == 2
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
    assert [*read_metrics(path)] == [finished_step(1), finished_step(2), finished_step(3)]
