"""Watches from outside of a process that may fill the host's memory, and hang it.

A trial is watched by its parent, a run by a process that it starts: below a first limit the run is
told, finishes its step and writes a checkpoint; below the second it is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

import psutil

from autotune.errors import AutotuneError, Preempted
from autotune.machine.capabilities import host_floor_bytes
from autotune.machine.sources import available_bytes, host_available_bytes, memory_bytes
from autotune.plan.hardware import MemoryKind, shares_host_memory

# Filling memory at 20 GB/s takes 0.4 GB meanwhile, far less than any floor.
POLL_SECONDS = 0.02
# The kernel takes seconds to return a large process's memory; the rest is another process's.
MAX_WAIT_SECONDS = 30.0
MAX_STALL_SECONDS = 1.0
# Smaller changes are the machine's own.
NOISE_BYTES = 64 * 2**20
COMMAND = (sys.executable, "-m", "autotune.train.watchdog")
HINT = (
    "close other programs, or plan again with more to spare: autotune plan --from PLAN --reserve "
    "4GiB; then go on from the last checkpoint with --resume"
)


class HostMemoryShort(AutotuneError):
    """The host has so little memory left that the run had to end."""


class Watchdog:
    """The guard of the host's memory: over trials by its methods, over a run as a context.

    Its shortage ends a run at once, or inside `finishing_steps` after a checkpoint.
    """

    def __init__(
        self,
        floor_bytes: int,
        available: Callable[[], int] = available_bytes,
        *,
        has_run: bool = False,
    ) -> None:
        self.floor_bytes, self.available, self.has_run = floor_bytes, available, has_run
        self.shortage: str | None = None
        self._waits = False
        self._process: subprocess.Popen[str] | None = None
        self._previous: Any = None

    @classmethod
    def of_device(cls, kind: MemoryKind) -> Self:
        """For a device with that kind of memory. No container's limit holds what CUDA takes of
        shared memory."""
        total, available = memory_bytes(), available_bytes
        if kind == "integrated":
            total, available = int(psutil.virtual_memory().total), host_available_bytes
        kind_of_floor: MemoryKind = "host" if kind == "host" else "integrated"
        floor = host_floor_bytes(kind_of_floor, total, available())
        return cls(floor, available, has_run=shares_host_memory(kind))

    def find_shortage(self) -> str | None:
        left = self.available()
        if left >= self.floor_bytes:
            return None
        return (
            f"the host had {left / 2**30:.1f} GiB left, less than the "
            f"{self.floor_bytes / 2**30:.1f} GiB that keep it alive: the trial was ended"
        )

    def wait_for_memory(self, wanted_bytes: int) -> None:
        """Wait until `wanted_bytes` are available, or no more memory comes back."""
        started = rising = time.monotonic()
        largest = self.available()
        while largest < wanted_bytes - NOISE_BYTES:
            time.sleep(POLL_SECONDS)
            now, left = time.monotonic(), self.available()
            if left > largest + NOISE_BYTES:
                largest, rising = left, now
            if now - rising > MAX_STALL_SECONDS or now - started > MAX_WAIT_SECONDS:
                return

    def __enter__(self) -> Self:
        if self.has_run and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR2, self._on_notice)
            limits = (self.floor_bytes, self.floor_bytes // 2)
            arguments = [*map(str, limits), str(self.available is host_available_bytes)]
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
        return self.shortage and "a shortage of host memory"

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
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


def watch_parent(notice_bytes: int, floor_bytes: int, available: Callable[[], int]) -> None:
    """Watch the run that started this process, until it ends."""
    run = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, for the run
    was_told = False
    while os.getppid() == run:
        left = available()
        if left < floor_bytes:
            sys.stderr.write(
                f"error: the host had {left / 2**20:,.0f} MiB left, so training was ended at once\n"
                f"hint: {HINT}\n"
            )
            os.kill(run, signal.SIGKILL)
            return
        if left < notice_bytes and not was_told:
            sys.stdout.write(f"{left}\n")
            sys.stdout.flush()
            os.kill(run, signal.SIGUSR2)
            was_told = True
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    watch_parent(
        int(sys.argv[1]),
        int(sys.argv[2]),
        host_available_bytes if sys.argv[3] == "True" else available_bytes,
    )
