"""Trials in real child processes, with real faults: each ends as a typed outcome, and the next
trial runs."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autotune.plan.candidate import CachingSettings, Candidate
from autotune.search.trials import MemoryLimits, ProcessTrialRunner, require_within_cap
from tests.search.conftest import FIRST, GIB, runner_for, workload


def child(runner: ProcessTrialRunner) -> psutil.Process:
    assert runner._child is not None
    return psutil.Process(runner._child.process.pid)


def test_cheap_knobs_share_a_child_and_a_reload_gets_a_fresh_one(
    runner: ProcessTrialRunner,
) -> None:
    first = runner.run(FIRST)
    assert first.outcome == "ok", first.message
    pid = child(runner).pid
    second = runner.run(
        first.candidate.model_copy(update={"micro_batch_size": 4, "checkpointed_blocks": 0})
    )
    assert second.outcome == "ok"
    assert child(runner).pid == pid
    quantized = runner.run(first.candidate.model_copy(update={"quantization": "torchao-int8"}))
    assert quantized.outcome == "ok"
    assert child(runner).pid != pid
    assert not psutil.pid_exists(pid)
    assert (
        (second.peak_memory_bytes or 0)
        > (first.peak_memory_bytes or 0)
        > (quantized.peak_memory_bytes or 0)
    )


@pytest.mark.slow
def test_the_same_learning_whatever_the_micro_batch_and_backend(runner: ProcessTrialRunner) -> None:
    settings = (
        FIRST,
        Candidate(micro_batch_size=2, checkpointed_blocks=3, precision="fp32"),
        Candidate(
            micro_batch_size=4, checkpointed_blocks=0, attention="_native_math", precision="fp32"
        ),
    )
    losses = [runner.run(candidate).final_loss for candidate in settings]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) == pytest.approx(losses[2], rel=1e-5)


def test_out_of_memory_is_an_outcome_and_the_next_trial_runs(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.trials.CPU_SPARE_BYTES", 0)
    large = workload(small_model, side_px=1024)
    with runner_for(small_model, large, GIB // 8) as runner:
        result = runner.run(FIRST.model_copy(update={"checkpointed_blocks": 0}))
        assert result.outcome == "oom", result
        runner.budget_bytes = runner.memory_cap_bytes = 8 * GIB
        runner.workload = workload(small_model)
        assert runner.run(FIRST).outcome == "ok"


def test_a_hanging_trial_times_out_and_its_child_is_gone(small_model: Path) -> None:
    with runner_for(small_model, workload(small_model)) as runner:
        assert runner.run(FIRST).outcome == "ok"
        stopped = child(runner)
        stopped.send_signal(signal.SIGSTOP)
        runner.timeout_seconds = 0.5
        result = runner.run(FIRST)
        assert result.outcome == "timeout"
        assert not stopped.is_running()
        runner.timeout_seconds = 600
        assert runner.run(FIRST).outcome == "ok"


@pytest.mark.quick("SIGKILL")
@pytest.mark.parametrize(("fault", "outcome"), [(signal.SIGSEGV, "crash"), (signal.SIGKILL, "oom")])
def test_a_child_that_dies_is_an_outcome(
    runner: ProcessTrialRunner, fault: signal.Signals, outcome: str
) -> None:
    assert runner.run(FIRST).outcome == "ok"
    victim = child(runner).pid
    runner.num_steps = 10_000

    def kill() -> None:
        time.sleep(0.5)
        os.kill(victim, fault)

    killer = threading.Thread(target=kill)
    killer.start()
    result = runner.run(FIRST)
    killer.join()
    assert result.outcome == outcome, result
    runner.num_steps = 1
    assert runner.run(FIRST).outcome == "ok"


def test_a_rehearsal_that_is_interrupted_leaves_no_child_and_no_file(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
def test_what_a_trial_took_of_a_card_is_held_against_its_cap(
    monkeypatch: pytest.MonkeyPatch, reserved: int, is_within: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved)
    limits = MemoryLimits("cuda:0", cap_bytes=6 * GIB, reserve_bytes=0)
    with (
        contextlib.nullcontext()
        if is_within
        else pytest.raises(MemoryError, match="6,144 MiB may be taken")
    ):
        require_within_cap(limits)
