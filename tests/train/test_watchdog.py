"""A run ends in good order before the host's memory is gone; the guard outside of it reads a
file instead."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.events import Event, StepFinished
from autotune.train import monitor
from autotune.train.folder import checkpoints_of
from autotune.train.monitor import HostMemoryShort, Watchdog
from autotune.train.run import train
from tests.train.conftest import Bench

PLENTY, SHORT, NONE_LEFT = 100, 9, 1
LIMIT = 10

READER = """
import sys
from pathlib import Path
from autotune.train.monitor import watch_parent
watch_parent(int(sys.argv[1]), int(sys.argv[2]), lambda: int(Path({path!r}).read_text() or 100))
"""


@pytest.fixture
def available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the guard takes for the memory that is available, in bytes."""
    path = tmp_path / "available"
    path.write_text(str(PLENTY))
    monkeypatch.setattr(monitor, "COMMAND", (sys.executable, "-c", READER.format(path=str(path))))
    monkeypatch.setattr(Watchdog, "of_device", lambda kind: Watchdog(LIMIT, has_run=kind == "host"))
    return path


def test_a_run_on_a_host_short_of_memory_writes_a_checkpoint_and_can_go_on(
    bench: Bench, tmp_path: Path, available: Path
) -> None:
    plan = bench.plan(num_steps=400, checkpointing_steps=0, output=str(tmp_path / "out"))
    taken = []

    def take(event: Event) -> None:
        if isinstance(event, StepFinished):
            taken.append(event.step)
            if event.step == 3:
                available.write_text(str(SHORT))

    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(
        HostMemoryShort, match=r"GiB left, .*stopped by a shortage of host memory"
    ) as end:
        train(plan, bench.hardware, tmp_path / "cache", take)
    assert (end.value.exit_status, "--resume" in end.value.hint) == (1, True)
    (checkpoint,) = checkpoints_of(tmp_path / "out")
    assert checkpoint.stem == f"checkpoint-{taken[-1]:06}"
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_run_that_is_still_loading_ends_at_once(
    bench: Bench, tmp_path: Path, available: Path
) -> None:
    available.write_text(str(SHORT))
    plan = bench.plan(num_steps=10**6, output=str(tmp_path / "out"))
    with pytest.raises(HostMemoryShort):
        train(plan, bench.hardware, tmp_path / "cache")


def test_a_shortage_that_a_library_takes_for_a_damaged_file_is_told_as_a_shortage(
    available: Path,
) -> None:
    def read() -> None:
        available.write_text(str(SHORT))
        try:
            time.sleep(60)
        except Exception as error:
            raise OSError("unreadable") from error

    with pytest.raises(HostMemoryShort, match="training was ended"), Watchdog.of_device("host"):
        read()


STUCK = """
import json, sys, time
from autotune.train import monitor
monitor.COMMAND = json.loads(sys.argv[1])
with monitor.Watchdog(10, has_run=True) as watched, watched.finishing_steps():
    time.sleep(1)
    open(sys.argv[2], "w").write("1")
    while True:
        time.sleep(0.1)
"""


def test_a_run_that_does_not_end_by_itself_is_killed_and_the_reason_told(available: Path) -> None:
    stuck = subprocess.run(
        [sys.executable, "-c", STUCK, json.dumps(monitor.COMMAND), str(available)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert stuck.returncode == -signal.SIGKILL
    assert stuck.stderr.startswith(
        "error: the host had 0 MiB left, so training was ended at once\nhint: close other"
    )


def test_a_device_with_memory_of_its_own_needs_no_guard() -> None:
    with Watchdog.of_device("discrete") as watched:
        assert watched._process is None
        assert watched.stop_reason is None
