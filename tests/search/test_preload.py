"""The fork server only imports: nothing parallel runs in it, no thread, no CUDA; a preload that
fails is noticed.

Nor does an import let a library settle that there is no GPU.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from autotune.search.trials import ProcessTrialRunner, require_preload
from autotune.search.worker import TASKS, ChildState, TrialRequest, run_trial

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
# Wherever there is a GPU triton is installed; without it only the question for devices can pretend so.
torch.utils._triton.has_triton_package = lambda: sys._getframe(1).f_code.co_name == "has_triton"
import autotune.search.preload
from torch.utils._triton import has_triton
print(list(asked), "bitsandbytes" in sys.modules, torch.cuda.is_available(), has_triton.cache_info().currsize)
"""


@dataclass(frozen=True)
class LookAround:
    """Tells about the fork server that the child came from."""


def look_around(_: LookAround, __: ChildState) -> tuple[int, bool, bool]:
    """Its threads, whether CUDA ran there or may not start here, and whether the libraries came
    with the fork."""
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    cuda = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    return threads, cuda, "autotune.search.preload" in sys.modules


TASKS[LookAround] = look_around


@pytest.mark.skipif(sys.platform != "linux", reason="threads of another process are seen in /proc")
def test_the_fork_server_has_one_thread_and_no_cuda(runner: ProcessTrialRunner) -> None:
    assert runner.send(LookAround()) == (1, False, True)


@dataclass(frozen=True)
class TrialThatTells:
    """Runs a trial, and tells whether the child has bitsandbytes then."""

    trial: TrialRequest


def run_and_tell(request: TrialThatTells, child: ChildState) -> tuple[str, bool]:
    return run_trial(request.trial, child).outcome, "bitsandbytes" in sys.modules


TASKS[TrialThatTells] = run_and_tell


def test_a_preload_that_failed_is_noticed_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "autotune.search.preload", None
    )  # as after an import that raised
    with pytest.raises(ImportError, match="preload"):
        require_preload()


@pytest.mark.slow
def test_no_import_asks_the_gpu_anything_that_starts_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRETEND_A_GPU],
        capture_output=True,
        text=True,
        check=True,
        timeout=480,
    )
    assert done.stdout.splitlines()[-1] == "[] False True 0"
