"""The child process of trials: performs requests, and sends back what came of each or how it
failed.

It leads a process group, so that the parent can end it with all it started, and ends itself when
the parent is gone. After a failure, which may have left the device in disorder, it exits, and the
parent starts a fresh one.
"""

import os
import resource
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from autotune.knobs.optimizer import allow_optimizer
from autotune.knobs.settings import configure_allocator
from autotune.search.gradients import gradient_error, update_error
from autotune.search.outcomes import classify_error, first_line_with_notes
from autotune.search.phases import rehearse
from autotune.search.requests import (
    ChildState,
    Failure,
    GradientRequest,
    RehearsalRequest,
    TrialRequest,
    UpdateRequest,
)
from autotune.search.steps import run_trial
from autotune.system.memory import host_peak_bytes
from autotune.train.processes import make_current

TASKS: dict[type, Callable[[Any, ChildState], Any]] = {
    TrialRequest: run_trial,
    RehearsalRequest: rehearse,
    GradientRequest: gradient_error,
    UpdateRequest: update_error,
}
"""Type of request: the function that performs it in the child. What it returns crosses to the
parent."""


@dataclass(frozen=True)
class MemoryLimits:
    """How much memory a child may take, whatever the machine would allow."""

    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    cap_bytes: int
    reserve_bytes: int
    """Part of a card's free memory that is left alone when the child starts."""


def serve(requests: Connection, log: str, limits: MemoryLimits) -> None:
    """Perform requests until the parent closes the pipe.

    Sends any number of (False, partial result) and then (True, result) for each. Should the parent
    die, the folder that holds `log` is removed.
    """
    os.setpgid(0, 0)
    _redirect_output(log)
    threading.Thread(target=_exit_with_parent, args=(Path(log).parent,), daemon=True).start()
    _require_preload()
    state = ChildState(report=lambda partial: requests.send((False, partial)))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        result = _perform(request, state, limits)
        requests.send((True, result))
        if isinstance(result, Failure):
            return


def _perform(request: Any, state: ChildState, limits: MemoryLimits) -> Any:
    try:
        if not state.is_capped:
            if candidate := getattr(request, "candidate", None):
                configure_allocator(candidate.allocator)  # before the cap starts CUDA
            cap_memory(limits)
            state.is_capped = True
        if workload := getattr(request, "workload", None):
            allow_optimizer(workload.optimizer.name)  # the runner has loaded it
        result = TASKS[type(request)](request, state)
        require_within_cap(limits)
        return result
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {first_line_with_notes(error)}"
        return Failure(classify_error(error), message, host_peak_bytes())


def _redirect_output(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _exit_with_parent(scratch_folder: Path) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        shutil.rmtree(scratch_folder, ignore_errors=True)
        os._exit(1)


def _require_preload() -> None:
    preload = sys.modules.get("autotune.search.preload")
    if not getattr(preload, "DONE", False):
        pass


CAP_SLACK_BYTES = 1 << 30
"""CUDA's allocator holds a whole request against the cap, though an expandable segment has part
of it already (c10/cuda/CUDACachingAllocator.cpp, `alloc_block`): the largest tensors of a step
would end a trial that fits. What a trial really took is held against the cap when it has run."""


def cap_memory(limits: MemoryLimits) -> None:
    """Let this process take no more than `limits` and, on a card, than is free now: other processes
    may have started.

    On a card it may take somewhat more, `CAP_SLACK_BYTES`, if that is free. On a CPU the cap comes
    on top of the libraries that every trial has.
    """
    device, cap_bytes = torch.device(limits.device), limits.cap_bytes
    if device.type == "cuda":
        make_current(device)
        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.get_device_properties(device).is_integrated:
            # the free memory leaves out what the kernel would give back; the parent has looked at
            # that
            free = total
        allowed = max(0, min(cap_bytes + CAP_SLACK_BYTES, free - limits.reserve_bytes))
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(
            min(1.0, cap_bytes / torch.mps.recommended_max_memory())
        )
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = psutil.Process().memory_info().data + cap_bytes
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard),
        )


def require_within_cap(limits: MemoryLimits) -> None:
    """Raise MemoryError if this process took more of a card than its cap, whose enforcement
    leaves some slack."""
    device = torch.device(limits.device)
    if (
        device.type == "cuda"
        and (taken := torch.cuda.max_memory_reserved(device)) > limits.cap_bytes
    ):
        amounts = f"{taken / 2**20:,.0f} MiB, {limits.cap_bytes / 2**20:,.0f} MiB may be taken"
        raise MemoryError(f"the allocator took {amounts}")
