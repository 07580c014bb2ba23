"""The child process: performs requests and answers, with what came of them or with how they failed.

It owns its process group, so that the parent can end it whole, and ends itself when the parent is gone. After a
failure that may have left the device in disorder it exits, and the parent starts a fresh one.
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

from autotune.knobs import configure_allocator
from autotune.schema import Outcome
from autotune.trials.requests import Request


@dataclass(frozen=True)
class Failure:
    """How a request ended that has no answer."""

    outcome: Outcome
    message: str
    host_memory_bytes: int | None = None
    so_far: Any = None
    """The last answer that was given before."""


@dataclass(frozen=True)
class Allowance:
    """What a child may take, whatever the machine would allow."""

    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    memory_cap_bytes: int
    reserve_bytes: int
    """Left of what a card has free when the child starts."""


def serve(requests: Connection, log: str, allowance: Allowance) -> None:
    """Answer requests until the parent closes the pipe: (True, answer), and before it any number of (False, so far).

    Should the parent die, the folder of `log` goes with it.
    """
    os.setpgid(0, 0)
    _redirect_output(log)
    threading.Thread(target=_exit_with_parent, args=(Path(log).parent,), daemon=True).start()
    _require_preload()
    kept: dict[str, Any] = {}
    while True:
        try:
            request: Request = requests.recv()
        except EOFError:
            return
        answer = _answer(request, kept, lambda so_far: requests.send((False, so_far)), allowance)
        requests.send((True, answer))
        if isinstance(answer, Failure):
            return


def _answer(request: Request, kept: dict[str, Any], tell: Callable[[Any], None], allowance: Allowance) -> Any:
    from autotune.runtime import host_peak_bytes
    from autotune.trials.outcomes import classify, one_line

    try:
        if "capped" not in kept:
            if candidate := getattr(request, "candidate", None):
                configure_allocator(candidate.allocator)  # before the cap starts CUDA
            cap_memory(allowance)
            kept["capped"] = True
        return request.perform(kept, tell)
    except BaseException as error:
        traceback.print_exc()
        return Failure(classify(error), f"{type(error).__name__}: {one_line(error)}", host_peak_bytes())


def _redirect_output(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _exit_with_parent(scratch: Path) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)


def _require_preload() -> None:
    preload = sys.modules.get("autotune.trials.preload")
    if not getattr(preload, "DONE", False):
        import autotune.trials.preload  # noqa: F401 - shows the error that the fork server swallowed


def cap_memory(allowance: Allowance) -> None:
    """Let this process take no more than it may and, of a card, than is free now: others may have come since.

    On a processor it is what comes on top of the libraries that every trial has.
    """
    import torch

    from autotune.training import make_current

    device, cap_bytes = torch.device(allowance.device), allowance.memory_cap_bytes
    if device.type == "cuda":
        make_current(device)
        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.get_device_properties(device).is_integrated:
            free = total  # what is called free there leaves out what the kernel would give back; the parent looked
        allowed = max(0, min(cap_bytes, free - allowance.reserve_bytes))
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(1.0, cap_bytes / torch.mps.recommended_max_memory()))
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = psutil.Process().memory_info().data + cap_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
