"""Keeps searches and runs off each other: an advisory lock that the system drops when its holder dies, however it dies.

Searches that ran at once would measure each other; they take turns, trial by trial. Training runs share the lock among
themselves: a run waits for a search to end, a search is refused while a run lasts. The lock file names its holder;
whoever waits for a turn holds a shared lock on a second file.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from autotune.errors import AutotuneError
from autotune.hardware.nvidia import DriverSource
from autotune.hardware.system import Unavailable
from autotune.runtime import cache_path, started_by_launcher
from autotune.schema import Device

SEARCH, RUN = "search", "training run"
"""What holders call themselves."""
LONGEST_WAIT_SECONDS = 1800.0
RETRY_SECONDS = 0.2


def lock_path(device: Device) -> Path:
    """Where the lock of a device lies: a GPU may have several users, a processor is tried by one.

    Where nobody can write to the cache folder, that of a processor lies in the temporary folder, too.
    """
    folder = cache_path()
    if device.kind == "cuda" or not _takes_files(folder):
        folder = Path(tempfile.gettempdir())
    return folder / f"autotune-{device.kind}-{_card(device)}-{device.file_name}.lock"


def _takes_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _card(device: Device) -> str:
    """Which card it is, whatever CUDA_VISIBLE_DEVICES makes of its index; the index where no driver tells."""
    if device.kind == "cuda":
        with contextlib.suppress(Unavailable, OSError, AttributeError):
            return DriverSource().uuid(device.index)
    return str(device.index)


_logger = logging.getLogger(__name__)


class DeviceLock:
    """The right to use one device; taken and given back any number of times."""

    def __init__(self, path: Path, on_wait: Callable[[str], None] = _logger.warning, *, trains: bool = False) -> None:
        """`on_wait` is told once who is being waited for. `trains`: for a training run, not for trials."""
        self.path, self.on_wait, self.trains = path, on_wait, trains
        self._waiting = path.with_suffix(".waiting")
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock, after whoever has it; nothing happens where it is held already.

        Raises:
            AutotuneError: a run has it, a search kept it too long, or the lock file cannot be opened.
        """
        if self._handle is not None:
            return
        handle = _open(self.path)
        try:
            if not self._locked(handle):
                self._wait(handle)
        except BaseException:
            os.close(handle)
            raise
        os.ftruncate(handle, 0)
        os.pwrite(
            handle,
            f"{RUN if self.trains else SEARCH} (process {os.getpid()} of {psutil.Process().username()})".encode(),
            0,
        )
        self._handle = handle

    def _locked(self, handle: int) -> bool:
        """Whether the lock could be had at once. A run lets searches that wait for a turn go first."""
        if self.trains:
            return not self.is_wanted() and locked(handle, fcntl.LOCK_SH)
        return locked(handle, fcntl.LOCK_EX)

    def _wait(self, handle: int) -> None:
        named = self.path.read_text(errors="replace").strip() or f"{SEARCH} (unknown process)"
        if named.startswith(RUN) and not self.trains and locked(handle, fcntl.LOCK_SH):  # which only runs share
            if self._locked(handle):
                return  # it has just ended
            raise AutotuneError(
                f"a {named} uses this device",
                hint="wait for it, or stop it: it writes a checkpoint, and `autotune train PLAN --resume` goes on; "
                "trials beside it would measure it",
            )
        holder = f"{'a' if self.trains else 'another'} {named} runs trials on this device"
        self.on_wait(f"{holder}: waiting for {'its end' if self.trains else 'a turn'}")
        started = time.monotonic()
        with _opened(self._waiting) as turns:
            if not self.trains:
                locked(turns, fcntl.LOCK_SH)
            while not self._locked(handle):
                if time.monotonic() - started > LONGEST_WAIT_SECONDS:
                    raise AutotuneError(
                        f"{holder} and has not ended in {LONGEST_WAIT_SECONDS:.0f} s",
                        hint="wait for it, or end it; what runs beside trials is measured with them",
                    )
                time.sleep(RETRY_SECONDS)

    def is_wanted(self) -> bool:
        """Whether another process waits for the lock."""
        with _opened(self._waiting) as turns:
            return not locked(turns, fcntl.LOCK_EX)

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
def held_for_run(device: Device, num_processes: int, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Keep searches off the devices of a training run while it lasts.

    Raises:
        AutotuneError: a search does not end, or a lock file cannot be opened.
    """
    if started_by_launcher():  # which holds them for all its processes
        yield
        return
    several = device.kind == "cuda" and num_processes > 1
    used = [device.changed(index=i) for i in range(num_processes)] if several else [device]
    with contextlib.ExitStack() as held:
        for one in used:
            lock = DeviceLock(lock_path(one), on_wait, trains=True)
            lock.take()
            held.callback(lock.give_back)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = _open(path)
    try:
        yield handle
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unlinked = os.O_RDWR | os.O_NOFOLLOW  # through a stranger's link in /tmp any file would be emptied
        if path.exists():  # of another user, maybe: opening to create would be refused in a shared folder
            return os.open(path, unlinked)
        handle = os.open(path, unlinked | os.O_CREAT, 0o666)
        os.fchmod(handle, 0o666)
        return handle
    except OSError as error:
        raise AutotuneError(
            f"the lock of this device, {path}, cannot be opened: {error.strerror}",
            hint="delete that file, or make it writable",
        ) from error


def locked(handle: int, how: int) -> bool:
    """Whether the open file `handle` could be locked at once, LOCK_SH or LOCK_EX; the lock goes when it is closed."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
