"""Each fault of a trial process ends as a typed outcome, and the next trial runs."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from autotune.machine import sources
from autotune.plan.candidate import CachingSettings
from autotune.search.trials import MemoryLimits, ProcessTrialRunner, find_spill, require_within_cap
from autotune.search.worker import TASKS, ChildState, Failure, classify_error
from autotune.train.watchdog import Watchdog
from tests.builders import candidate, trial
from tests.search.conftest import FIRST, GIB, runner_for, workload

MIB = 2**20


def child(runner: ProcessTrialRunner) -> psutil.Process:
    assert runner._child is not None
    return psutil.Process(runner._child.process.pid)


def test_only_reload_needs_fresh_child(runner):
    first = runner.run(FIRST)
    assert first.outcome == "ok", first.message
    pid = child(runner).pid
    second = runner.run(FIRST.changed(micro_batch_size=4, checkpointed_blocks=0))
    assert (second.outcome, child(runner).pid) == ("ok", pid)
    quantized = runner.run(FIRST.changed(quantization="torchao-int8"))
    assert quantized.outcome == "ok"
    assert not psutil.pid_exists(pid)
    peaks = [each.peak_memory_bytes or 0 for each in (quantized, first, second)]
    assert peaks == sorted(peaks)


def test_child_without_memory_is_outcome(small_model, monkeypatch):
    monkeypatch.setattr("autotune.search.trials.CPU_SPARE_BYTES", 0)
    with runner_for(small_model, workload(small_model, side_px=1024), GIB // 8) as runner:
        result = runner.run(FIRST.changed(checkpointed_blocks=0))
        assert result.outcome == "oom", result


def test_faulty_children_are_outcomes(runner):
    assert runner.run(FIRST).outcome == "ok"
    stopped = child(runner)
    stopped.send_signal(signal.SIGSTOP)
    runner.timeout_seconds = 0.5
    assert runner.run(FIRST).outcome == "timeout"
    assert not stopped.is_running()
    runner.timeout_seconds = 600
    assert runner.run(FIRST).outcome == "ok"
    victim = child(runner).pid
    runner.num_steps = 10_000
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    result = runner.run(FIRST)
    assert result.outcome == "oom", result


def test_interrupted_rehearsals_leave_nothing(small_model, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running: list[psutil.Process] = []

    def interrupted(child: Any, deadline: float) -> Any:
        child.requests.recv()  # what is known after some phase
        running.append(psutil.Process(child.process.pid))
        assert list(tmp_path.glob("*/autotune-rehearsal-*"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), runner_for(small_model, workload(small_model)) as runner:  # noqa: PT012
        monkeypatch.setattr(runner, "_receive", interrupted)
        runner.confirm(FIRST, CachingSettings(), 1.0)
    assert not running[0].is_running()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("reserved", "is_within"), [(6 * GIB, True), (6 * GIB + 1, False)])
def test_lent_memory_counts_against_caps(monkeypatch, reserved, is_within):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved)
    limits = MemoryLimits("cuda:0", cap_bytes=6 * GIB, reserve_bytes=0)
    if is_within:
        require_within_cap(limits)
    else:
        with pytest.raises(MemoryError, match="6,144 MiB may be taken"):
            require_within_cap(limits)


def test_cliffs_near_the_edge_are_spills():
    earlier = [(trial(candidate(), 1.0), 1.0), (trial(candidate(), 2.0), 1.5)]
    slow = trial(candidate(), 9.0, 9 * GIB)
    assert "spilled" in (find_spill(slow, 1.0, earlier, 10 * GIB) or "")
    assert find_spill(slow, 9.0, earlier, 10 * GIB) is None
    assert find_spill(slow, 1.0, earlier, 20 * GIB) is None


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "cudaErrorMemoryAllocation: the API call failed",
        "CUDA driver error: err 2 != CUDA_SUCCESS",
    ],
)
def test_memory_runs_out_in_many_words(words):
    assert classify_error(RuntimeError(words)) == "oom"
    assert classify_error(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")) == "crash"


@dataclass(frozen=True)
class Grab:
    """Takes that many times 64 MiB of host memory, after starting a process of its own."""

    pids: str
    blocks: int


def take_memory(request: Grab, _: ChildState) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    Path(request.pids).write_text(str(sleeper.pid))
    held = []
    for _block in range(request.blocks):
        held.append(np.ones(64 * MIB, dtype=np.uint8))
        time.sleep(0.02)


TASKS[Grab] = take_memory


def test_greedy_children_end_in_groups(small_model, tmp_path):
    watchdog, pids = Watchdog(floor_bytes=0), str(tmp_path / "pid")
    with runner_for(small_model, workload(small_model), 64 * GIB, watchdog=watchdog) as runner:
        runner.send(Grab(pids, blocks=0))  # a child that was allowed more than is left now
        watchdog.floor_bytes = sources.available_bytes() - 300 * MIB
        answer = runner.send(Grab(pids, blocks=256))  # 16 GiB at most, should the watchdog fail
        assert isinstance(answer, Failure)
        result = runner.classify(FIRST, answer)
        assert result.outcome == "oom"
        assert "the trial was ended" in result.message
        sleeper = int(Path(pids).read_text())
        gone = not psutil.pid_exists(sleeper)
        assert gone or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE


def test_watchdog_limits_what_is_tried(small_model):
    watchdog = Watchdog(floor_bytes=3 * GIB, available=lambda: 4 * GIB)
    with runner_for(small_model, workload(small_model), 64 * GIB, watchdog=watchdog) as runner:
        assert runner._cap_bytes() == GIB


def test_container_limits_count_but_for_cuda(monkeypatch):
    limits = [(4 * MIB, 2 * MIB), (8 * MIB, 3 * MIB)]
    monkeypatch.setattr("autotune.machine.sources.memory_limits", lambda: limits)
    monkeypatch.setattr(sources, "_is_limited", lambda: True)
    for kind, is_limited in (("host", True), ("discrete", True), ("integrated", False)):
        watchdog = Watchdog.of_device(kind)  # type: ignore[arg-type]
        assert (watchdog.available() == 2 * MIB) is is_limited
        assert (watchdog.floor_bytes <= MIB // 2) is is_limited


PRETEND_A_GPU = """
import torch, sys
asked = []
def record(name, answer):
    setattr(torch.cuda, name, lambda *a, **k: asked.append(name) or answer)
torch.version.cuda = "13.0"
record("is_available", True)
record("get_device_capability", (9, 0))
record("get_device_properties", None)
record("_lazy_init", None)
record("init", None)
record("current_device", 0)
record("device_count", 1)
import torch.utils._triton
# Wherever there is a GPU triton is installed; without it only the question can pretend so.
torch.utils._triton.has_triton_package = lambda: sys._getframe(1).f_code.co_name == "has_triton"
import autotune.search.preload
from torch.utils._triton import has_triton
has_asked = has_triton.cache_info().currsize
print(list(asked), "bitsandbytes" in sys.modules, torch.cuda.is_available(), has_asked)
"""


@dataclass(frozen=True)
class LookAround:
    """Tells about the fork server that the child came from."""


def look_around(_: LookAround, __: ChildState) -> tuple[int, bool]:
    """Number of its threads, and whether CUDA ran there or may not start here."""
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    return threads, torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()


TASKS[LookAround] = look_around


def test_fork_server_stays_clean(runner):
    """A parallel operation there would deadlock its children."""
    assert runner.send(LookAround()) == (1, False)


@pytest.mark.slow
def test_imports_never_start_cuda():
    command = [sys.executable, "-c", PRETEND_A_GPU]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=480)
    assert done.stdout.splitlines()[-1] == "[] False True 0"
