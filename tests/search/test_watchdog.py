"""The host survives a child that takes its memory: the parent sees it and ends the child with
all it started."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from autotune.machine import sources
from autotune.search.worker import TASKS, ChildState, Failure
from autotune.train.monitor import Watchdog
from tests.search.conftest import FIRST, GIB, runner_for, workload

MIB = 2**20


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


def test_a_child_that_takes_the_hosts_memory_is_ended_with_its_group(
    small_model: Path, tmp_path: Path
) -> None:
    watchdog = Watchdog(floor_bytes=0)
    with runner_for(small_model, workload(small_model), 64 * GIB, watchdog=watchdog) as runner:
        runner.send(
            Grab(str(tmp_path / "pid"), blocks=0)
        )  # a child that was allowed more than is left now
        watchdog.floor_bytes = sources.available_bytes() - 600 * MIB
        answer = runner.send(
            Grab(str(tmp_path / "pid"), blocks=256)
        )  # 16 GiB at most, should the watchdog fail
        assert isinstance(answer, Failure)
        result = runner.classify(FIRST, answer)
        assert result.outcome == "oom"
        assert "the host had" in result.message
        assert "the trial was ended" in result.message
        sleeper = int((tmp_path / "pid").read_text())
        assert (
            not psutil.pid_exists(sleeper)
            or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE
        )
        watchdog.floor_bytes = 0
        assert runner.run(FIRST).outcome == "ok"


def test_nothing_is_tried_beyond_what_the_watchdog_would_allow(small_model: Path) -> None:
    """The allocator's own cap comes first: the watchdog is for what no cap holds."""
    watchdog = Watchdog(floor_bytes=3 * GIB, available=lambda: 4 * GIB)
    with runner_for(small_model, workload(small_model), 64 * GIB, watchdog=watchdog) as runner:
        assert runner._cap_bytes() == GIB


def test_a_containers_limit_counts_except_for_what_cuda_takes_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "autotune.machine.sources.memory_limits", lambda: [(4 * MIB, 2 * MIB), (8 * MIB, 3 * MIB)]
    )
    monkeypatch.setattr(sources, "_is_limited", lambda: True)
    for kind, left in (("host", 2 * MIB), ("discrete", 2 * MIB), ("integrated", 0)):
        watchdog = Watchdog.of_device(kind)  # type: ignore[arg-type]
        assert (watchdog.available() == left, watchdog.floor_bytes <= MIB // 2) == (
            bool(left),
            bool(left),
        )
