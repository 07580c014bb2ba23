"""Guards the host's memory from a process of its own, which starts without torch."""

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
from autotune.machine import capabilities
from autotune.machine.sources import available_bytes, host_available_bytes, memory_bytes
from autotune.plan.hardware import MemoryKind, shares_host_memory
from autotune.system import process

POLL_SECONDS = 0.02  # filling memory at 20 GB/s takes 0.4 GB meanwhile, far less than any floor
# The kernel takes seconds to return a large process's memory; the rest is another process's.
MAX_WAIT_SECONDS = 30.0
MAX_STALL_SECONDS = 1.0
NOISE_BYTES = 64 * 2**20  # smaller changes are the machine's own
COMMAND = (*process.PYTHON, "-m", "autotune.train.watchdog")
HINT = (
    "close other programs, or plan again with more to spare: autotune plan --from PLAN --reserve "
    "4GiB; then go on from the last checkpoint with --resume"
)


class HostMemoryShort(AutotuneError):
    """The host has so little memory left that the run had to end."""


class Watchdog:
    """The guard of the host's memory: over trials by its methods, over a run as a context."""

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
        self._listener: threading.Thread | None = None
        self._previous: Any = None

    @classmethod
    def of_device(cls, kind: MemoryKind) -> Self:
        """Guard a device's host; no container's limit holds what CUDA takes of shared memory."""
        total, available = memory_bytes(), available_bytes
        if kind == "integrated":
            total, available = int(psutil.virtual_memory().total), host_available_bytes
        kind_of_floor: MemoryKind = "host" if kind == "host" else "integrated"
        floor = capabilities.host_floor_bytes(kind_of_floor, total, available())
        return cls(floor, available, has_run=shares_host_memory(kind))

    def find_shortage(self) -> str | None:
        left, floor = self.available() / 2**30, self.floor_bytes / 2**30
        if left >= floor:
            return None
        floor_text = f"less than the {floor:.1f} GiB that keep the machine alive"
        return f"{left:.1f} GiB of system RAM were left, {floor_text}: the trial was ended"

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
        if self.has_run:
            # Only the main thread can be interrupted: in another, a run ends after its step.
            interrupts = threading.current_thread() is threading.main_thread()
            if interrupts:
                self._previous = signal.signal(signal.SIGUSR2, self._on_signal)
            whole_host = self.available is host_available_bytes
            known = os.getpid(), self.floor_bytes, self.floor_bytes // 2, whole_host
            command = [*COMMAND, *map(str, known)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._listener = threading.Thread(target=self._listen, args=(interrupts,), daemon=True)
            self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: object
    ) -> None:
        if self._process and self._listener:
            self._waits = True
            self._process.kill()
            self._process.wait()
            self._listener.join()
            if self._previous is not None:
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
        return self.shortage and "a shortage of system RAM"

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

    def _listen(self, interrupts: bool) -> None:
        if self._process is None or self._process.stdout is None:
            return
        with self._process.stdout as notices:
            for line in notices:
                left = int(line) / 2**30
                self.shortage = f"{left:.2f} GiB of system RAM were left, too little to stay alive"
                if interrupts and (main := threading.main_thread().ident):
                    signal.pthread_kill(main, signal.SIGUSR2)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.shortage and not self._waits:
            raise self._ended()

    def _ended(self) -> HostMemoryShort:
        return HostMemoryShort(f"{self.shortage}: training was ended", hint=HINT)


def watch_parent(
    run: int, notice_bytes: int, floor_bytes: int, available: Callable[[], int]
) -> None:
    """Watch the run that started this process, whose process id is `run`, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, for the run
    was_told = False
    while os.getppid() == run:
        left = available()
        if left < floor_bytes:
            message = f"{left / 2**20:,.0f} MiB of system RAM were left: training was ended at once"
            sys.stderr.write(f"error: {message}\nhint: {HINT}\n")
            os.kill(run, signal.SIGKILL)
            return
        if left < notice_bytes and not was_told:
            sys.stdout.write(f"{left}\n")
            sys.stdout.flush()
            was_told = True
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    run_id, notice, floor, whole_host = sys.argv[1:]
    read = host_available_bytes if whole_host == "True" else available_bytes
    watch_parent(int(run_id), int(notice), int(floor), read)
