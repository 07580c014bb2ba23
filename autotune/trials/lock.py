"""Keeps two searches off one device: an advisory lock that the system drops when its holder dies, however it dies.

Searches that ran at once would measure each other; they take turns, trial by trial. The lock file holds the id of the
process that has it; whoever waits holds a shared lock on a second file.
"""

import contextlib
import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
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


_logger = logging.getLogger(__name__)


class DeviceLock:
    """The right to run trials on one device; taken and given back any number of times."""

    def __init__(
        self,
        path: Path,
        on_wait: Callable[[str], None] = _logger.warning,
        longest_wait_seconds: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        """`on_wait` is told once who is being waited for."""
        self.path, self.on_wait, self.longest_wait_seconds = path, on_wait, longest_wait_seconds
        self._waiting = path.with_suffix(".waiting")
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock, after whoever has it; nothing happens where it is held already.

        Raises:
            AutotuneError: another process kept it too long, or the lock file cannot be opened.
        """
        if self._handle is not None:
            return
        handle = _open(self.path)
        try:
            if not _locked(handle, fcntl.LOCK_EX):
                self._wait(handle)
        except BaseException:
            os.close(handle)
            raise
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._handle = handle

    def _wait(self, handle: int) -> None:
        holder = f"another search (process {self.path.read_text().strip() or 'unknown'}) runs trials on this device"
        self.on_wait(f"{holder}: waiting for a turn")
        started = time.monotonic()
        with _shared(self._waiting):
            while not _locked(handle, fcntl.LOCK_EX):
                if time.monotonic() - started > self.longest_wait_seconds:
                    raise AutotuneError(
                        f"{holder} and has not ended in {self.longest_wait_seconds:.0f} s",
                        hint="wait for it, or end it; trials that run at once would measure each other",
                    )
                time.sleep(RETRY_SECONDS)

    def is_wanted(self) -> bool:
        """Whether another process waits for the lock."""
        handle = _open(self._waiting)
        try:
            return not _locked(handle, fcntl.LOCK_EX)
        finally:
            os.close(handle)

    def give_back(self) -> None:
        """Let others have the device; whoever waits gets it before this process can take it again."""
        if self._handle is None:
            return
        os.close(self._handle)  # which unlocks it
        self._handle = None
        started = time.monotonic()
        while self.is_wanted() and time.monotonic() - started < 5 * RETRY_SECONDS:
            time.sleep(RETRY_SECONDS / 4)


@contextlib.contextmanager
def _shared(path: Path) -> Iterator[None]:
    handle = _open(path)
    try:
        _locked(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # of another user, maybe: opening to create would be refused in a shared folder
            return os.open(path, os.O_RDWR)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(handle, 0o666)
        return handle
    except OSError as error:
        raise AutotuneError(
            f"the lock of this device, {path}, cannot be opened: {error.strerror}",
            hint="delete that file, or make it writable",
        ) from error


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
