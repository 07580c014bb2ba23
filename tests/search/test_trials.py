"""Each fault of a trial process ends as a typed outcome, and the next trial runs."""

import gc
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from autotune.data.encode import Encoders
from autotune.machine import sources
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings, TrialResult
from autotune.plan.job import ModelRef
from autotune.search.rehearsal import RehearsalRequest, largest_preview, rehearse_caching
from autotune.search.trials import MemoryLimits, find_spill, require_within_cap
from autotune.search.worker import Failure, classify_error
from autotune.train.watchdog import Watchdog
from tests.builders import candidate, trial
from tests.search.conftest import FIRST, GIB, runner_for, workload

MIB = 2**20


def child(runner):
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
    running = []

    def interrupted(child, deadline):
        child.requests.recv()  # what is known after some phase
        running.append(psutil.Process(child.process.pid))
        assert list(tmp_path.glob("*/autotune-rehearsal-*"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), runner_for(small_model, workload(small_model)) as runner:  # noqa: PT012
        monkeypatch.setattr(runner, "_receive", interrupted)
        runner.rehearse(FIRST, CachingSettings(), 1.0)
    assert not running[0].is_running()
    assert not list(tmp_path.iterdir())


def test_lent_memory_counts_against_caps(monkeypatch):
    reserved = iter((6 * GIB, 6 * GIB + 1))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved))
    limits = MemoryLimits("cuda:0", cap_bytes=6 * GIB, reserve_bytes=0)
    require_within_cap(limits)
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

    def perform(self, _):
        sleeper = subprocess.Popen(["sleep", "600"])
        Path(self.pids).write_text(str(sleeper.pid))
        held = []
        for _block in range(self.blocks):
            held.append(np.ones(64 * MIB, dtype=np.uint8))
            time.sleep(0.02)


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
        watchdog = Watchdog.of_device(kind)
        assert (watchdog.available() == 2 * MIB) is is_limited
        assert (watchdog.floor_bytes <= MIB // 2) is is_limited


@dataclass(frozen=True)
class LookAround:
    """Tells about the fork server that the child came from."""

    def perform(self, _):
        threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
        return threads, torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()


def test_fork_server_stays_clean(runner):
    """A parallel operation there would deadlock its children."""
    assert runner.send(LookAround()) == (1, False)


PHASES = ["caching", "loading", "training", "previews", "saving"]


def test_every_phase_is_rehearsed(runner):
    result = runner.rehearse(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok", result.message
    assert result.confirms
    assert [phase.name for phase in result.phases] == PHASES
    assert all(phase.seconds > 0 and (phase.host_bytes or 0) > 0 for phase in result.phases)
    short = runner.run(FIRST)
    assert not short.confirms
    assert short.peak_memory_bytes == pytest.approx(result.peak_memory_bytes, rel=0.01)


def test_later_failures_keep_what_is_known(runner, monkeypatch):
    known = TrialResult(
        candidate=FIRST, outcome="ok", step_seconds=(1.0,), peak_memory_bytes=GIB, confirms=True
    )
    failure = Failure("timeout", "it failed")
    monkeypatch.setattr(runner, "send", lambda request: failure)
    assert runner.rehearse(FIRST, CachingSettings(), 1.0).outcome == "timeout"
    failure.partial = known
    result = runner.rehearse(FIRST, CachingSettings(), 1.0)
    assert (result.outcome, result.step_seconds) == ("ok", (1.0,))
    assert "it failed" in result.message


def test_encoders_go_before_pixels(small_model, tmp_path, monkeypatch):
    """And all of it before the transformer is loaded: as in training, by reference counts."""
    caching, work = CachingSettings(), workload(small_model)
    model = resolve_model(ModelRef.of(small_model))
    request = RehearsalRequest(model, work, FIRST, "cpu", 3, caching=caching, max_seconds=1.0)
    loaded, seen = Encoders.load_pipeline, []
    refs = []

    def watched(encoders, **options):
        pipeline = loaded(encoders, **options)
        if not refs:
            refs.extend(weakref.ref(part) for part in (pipeline.text_encoder, pipeline.vae))
        return pipeline

    def encode_pixels(pipeline, pixels):
        seen.append(refs[0]())

    monkeypatch.setattr(Encoders, "load_pipeline", watched)
    monkeypatch.setattr(type(model.family), "encode_pixels", staticmethod(encode_pixels))
    gc.disable()
    try:
        preview = largest_preview(request, model, tmp_path)
        rehearse_caching(request, model, preview, tmp_path / "cache")
        assert seen == [None]
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
