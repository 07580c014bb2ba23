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

from autotune.trials import worker
from autotune.trials.requests import ChildState, TrialRequest
from autotune.trials.runner import ProcessTrialRunner
from autotune.trials.steps import run_trial
from autotune.trials.worker import TASKS
from tests.builders import BITSANDBYTES
from tests.trials.conftest import FIRST

PARALLEL_FROM = 32768
"""Elements from which ATen shares out an operation among threads (at::internal::GRAIN_SIZE)."""

LARGEST_OPERATION = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Counting(TorchDispatchMode):
    largest = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in (result, *args) if isinstance(one, torch.Tensor)]
        Counting.largest = max([Counting.largest, *(one.numel() for one in tensors)])
        return result
with Counting():
    import autotune.trials.preload
print(Counting.largest, torch.cuda.is_initialized())
"""


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
import autotune.trials.preload
from torch.utils._triton import has_triton
print(list(asked), "bitsandbytes" in sys.modules, torch.cuda.is_available(), has_triton.cache_info().currsize)
"""


@dataclass(frozen=True)
class LookAround:
    """Tells about the fork server that the child came from."""


def look_around(_: LookAround, __: ChildState) -> tuple[int, bool, bool]:
    """Its threads, whether CUDA ran there or may not start here, and whether the libraries came
    with the fork.
    """
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    cuda = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    return threads, cuda, "autotune.trials.preload" in sys.modules


TASKS[LookAround] = look_around


@pytest.mark.skipif(sys.platform != "linux", reason="threads of another process are seen in /proc")
def test_the_fork_server_has_one_thread_and_no_cuda(runner: ProcessTrialRunner) -> None:
    assert runner.ask(LookAround()) == (1, False, True)


@dataclass(frozen=True)
class TrialThatTells:
    """Runs a trial, and tells whether the child has bitsandbytes then."""

    trial: TrialRequest


def run_and_tell(request: TrialThatTells, child: ChildState) -> tuple[str, bool]:
    return run_trial(request.trial, child).outcome, "bitsandbytes" in sys.modules


TASKS[TrialThatTells] = run_and_tell


@BITSANDBYTES
def test_a_trial_does_not_wait_for_a_library_that_it_has_no_use_for(
    runner: ProcessTrialRunner,
) -> None:
    """peft would import bitsandbytes to look for its layers: a second or two, in every child."""
    trial = TrialRequest(runner.model, runner.workload, FIRST, runner.device, num_steps=1)
    assert runner.ask(TrialThatTells(trial)) == ("ok", False)


@pytest.mark.slow
def test_no_parallel_operation_runs_while_it_imports() -> None:
    """Libraries build a few constants of a handful of numbers; a parallel operation would
    deadlock the children.
    """
    command = [sys.executable, "-c", LARGEST_OPERATION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=True)
    largest, cuda = done.stdout.split()
    assert int(largest) < PARALLEL_FROM
    assert cuda == "False"


def test_a_preload_that_failed_is_noticed_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "autotune.trials.preload", None
    )  # as after an import that raised
    with pytest.raises(ImportError, match="preload"):
        worker._require_preload()


@pytest.mark.slow
@BITSANDBYTES
def test_a_library_that_is_there_already_stays_whole() -> None:
    code = (
        "import bitsandbytes, autotune.trials.preload, sys; "
        "sys.modules['bitsandbytes'].nn.Linear4bit"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=480
    )
    assert done.returncode == 0, done.stderr


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


def test_torch_compiles_none_of_its_own_kernels_at_their_first_call() -> None:
    """On CUDA it would need a C compiler; `tests/conftest.py` silenced libraries before torch
    was imported.
    """
    native = pytest.importorskip("torch._native.common_utils")
    assert native.check_native_jit_disabled()
