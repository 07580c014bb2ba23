"""Keeps two searches off one device: an advisory lock that the system drops when its holder dies, however it dies.

Searches that ran at once would measure each other. A lock file holds the id of the process that has it.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from autotune.errors import AutotuneError
from autotune.schema import Device

LONGEST_WAIT_SECONDS = 1800.0
RETRY_SECONDS = 0.2


def lock_path(device: Device) -> Path:
    """Where the lock of a device lies: a GPU may have several users, a processor is tried by one."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")[:60]
    folder = Path(tempfile.gettempdir()) if device.kind == "cuda" else platformdirs.user_cache_path("autotune")
    return folder / f"autotune-{device.kind}-{device.index}-{name}.lock"


class DeviceLock:
    """The right to run trials on one device; taken and given back any number of times."""

    def __init__(
        self,
        path: Path,
        on_wait: Callable[[str], None] = lambda message: None,
        longest_wait_seconds: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        """`on_wait` is told once who is being waited for."""
        self.path, self.on_wait, self.longest_wait_seconds = path, on_wait, longest_wait_seconds
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock, after whoever has it; nothing happens where it is held already.

        Raises:
            AutotuneError: another process kept it too long, or the lock file cannot be opened.
        """
        if self._handle is not None:
            return
        handle = self._open()
        started, told = time.monotonic(), False
        while not _locked(handle):
            holder = f"another search (process {self._holder()}) runs trials on this device"
            if time.monotonic() - started > self.longest_wait_seconds:
                os.close(handle)
                raise AutotuneError(
                    f"{holder} and has not ended in {self.longest_wait_seconds:.0f} s",
                    hint="wait for it, or end it; trials that run at once would measure each other",
                )
            if not told:
                self.on_wait(f"{holder}: waiting for it to end")
                told = True
            time.sleep(RETRY_SECONDS)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._handle = handle

    def give_back(self) -> None:
        """Let others have the device."""
        if self._handle is not None:
            os.close(self._handle)  # which unlocks it
            self._handle = None

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # of another user, maybe: opening to create would be refused in a shared folder
                return os.open(self.path, os.O_RDWR)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            os.fchmod(handle, 0o666)
            return handle
        except OSError as error:
            raise AutotuneError(
                f"the lock of this device, {self.path}, cannot be opened: {error.strerror}",
                hint="delete that file, or make it writable",
            ) from error

    def _holder(self) -> str:
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
