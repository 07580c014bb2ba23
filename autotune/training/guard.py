"""Ends a run in good order before it takes the host's last memory, where the device shares it with
the host.

A process outside watches (`guard_process.py`), as the one outside of trials does: below half of the
host's reserve it tells the run, which finishes its step and writes a checkpoint; below a quarter it
kills it, because a host without memory hangs before anything raises.
"""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

import psutil

from autotune.errors import AutotuneError, Preempted
from autotune.hardware import (
    available_bytes,
    host_available_bytes,
    host_floor_bytes,
    memory_bytes,
    shares_host_memory,
)
from autotune.schema import MemoryKind

COMMAND = (sys.executable, "-m", "autotune.training.guard_process")
HINT = (
    "close other programs, or plan again with more to spare: autotune plan --from PLAN --reserve "
    "4GiB; "
    "then go on from the last checkpoint with --resume"
)


class HostMemoryShort(AutotuneError):
    """The host has so little memory left that the run had to end."""


class MemoryGuard:
    """A context in which the host's memory is watched; without effect for devices that have their
    own.

    Raises:
        HostMemoryShort: memory is short. Inside `finishing_steps` only after the step, with a
            checkpoint written.
    """

    def __init__(self, kind: MemoryKind) -> None:
        self.kind = kind
        self.shortage: str | None = None
        """What the host had left; None while it has enough."""
        self._waits = False
        self._process: subprocess.Popen[str] | None = None
        self._previous: Any = None

    def limits(self) -> tuple[int, int]:
        """Bytes that must be available: below the first a run ends in good order, below the
        second it is killed.
        """
        whole_host = (
            self.kind == "integrated"
        )  # no container's limit holds what CUDA takes of shared memory
        total = int(psutil.virtual_memory().total) if whole_host else memory_bytes()
        notice = host_floor_bytes(
            self.kind, total, (host_available_bytes if whole_host else available_bytes)()
        )
        return notice, notice // 2

    def __enter__(self) -> Self:
        if shares_host_memory(self.kind) and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR2, self._on_notice)
            arguments = [*map(str, self.limits()), str(self.kind == "integrated")]
            self._process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=subprocess.PIPE, text=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: object
    ) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            signal.signal(signal.SIGUSR2, self._previous)
        # Raised within a library, the shortage may arrive here as what that library, or a reader of
        # files, made of it.
        causes = [failure]
        while cause := causes[-1] and (causes[-1].__cause__ or causes[-1].__context__):
            causes.append(cause)
        if any(isinstance(cause, HostMemoryShort) for cause in causes[1:]):
            raise self._ended() from failure

    @property
    def stop_reason(self) -> str | None:
        """Why no further step may be taken."""
        return self.shortage and "a shortage of host memory"

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """While steps are taken, which look at `stop_reason` themselves: a run ends after a
        step.
        """
        if self.shortage:  # it came while something else could not be left
            raise HostMemoryShort(self.shortage, hint=HINT)
        self._waits = True
        try:
            yield
        except Preempted as stop:
            if self.shortage:
                raise HostMemoryShort(f"{self.shortage}: {stop.message}", hint=HINT) from stop
            raise
        finally:
            self._waits = False

    def _on_notice(self, number: int, frame: FrameType | None) -> None:
        if self._process is None or self._process.stdout is None or self.shortage:
            return
        left = int(self._process.stdout.readline() or 0)
        self.shortage = f"the host had {left / 2**30:.2f} GiB left, too little to stay alive"
        if not self._waits:
            raise self._ended()

    def _ended(self) -> HostMemoryShort:
        return HostMemoryShort(f"{self.shortage}: training was ended", hint=HINT)
