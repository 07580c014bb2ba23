"""The fork server only imports: no operation runs in it, no thread, no CUDA; and a preload that fails is noticed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.trials import worker
from autotune.trials.runner import ProcessTrialRunner

NO_OPERATION = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Counting(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Counting.count += 1
        return function(*args, **(kwargs or {}))
with Counting():
    import autotune.trials.preload
print(Counting.count, torch.cuda.is_initialized())
"""


@dataclass(frozen=True)
class LookAround:
    """Tells about the fork server that the child came from."""

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> tuple[int, bool, bool]:
        """Its threads, whether CUDA runs here, and whether the libraries came with the fork."""
        import torch

        threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
        return threads, torch.cuda.is_initialized(), "autotune.trials.preload" in sys.modules


@pytest.mark.skipif(sys.platform != "linux", reason="threads of another process are seen in /proc")
def test_the_fork_server_has_one_thread_and_no_cuda(runner: ProcessTrialRunner) -> None:
    assert runner.ask(LookAround()) == (1, False, True)


def test_no_operation_runs_while_it_imports() -> None:
    done = subprocess.run([sys.executable, "-c", NO_OPERATION], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "False"]


def test_a_preload_that_failed_is_noticed_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autotune.trials.preload", None)  # as after an import that raised
    with pytest.raises(ImportError, match="preload"):
        worker._require_preload()
