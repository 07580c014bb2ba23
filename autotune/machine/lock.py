"""The right to use a device: searches take it alone and in turns, runs share it."""

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil

from autotune.errors import AutotuneError
from autotune.machine.sources import DriverSource, Unavailable
from autotune.plan.hardware import Device
from autotune.system import files

SEARCH, RUN = "search", "training run"  # what the lock file calls its holder
MAX_WAIT_SECONDS = 1800.0
RETRY_SECONDS = 0.2

_logger = logging.getLogger(__name__)


def lock_path(device: Device) -> Path:
    """Return the lock file: in the temporary folder for a GPU, which several users may share. A
    CPU's lies in the user's cache folder, or in the temporary folder if that cannot be written."""
    folder = files.cache_path()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if device.kind == "cuda" or not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    return folder / f"autotune-{device.kind}-{_card_id(device)}-{device.file_name}.lock"


def _card_id(device: Device) -> str:
    if device.kind == "cuda":
        with contextlib.suppress(Unavailable, OSError, AttributeError):
            return DriverSource().uuid(device.index)
    return str(device.index)


class DeviceLock:
    """The right to use one device, again and again; `on_wait` is told whom the lock waits for."""

    def __init__(
        self,
        path: Path,
        on_wait: Callable[[str], None] = _logger.warning,
        *,
        for_training: bool = False,
    ) -> None:
        self.path, self.on_wait, self.for_training = path, on_wait, for_training
        self._waiting = path.with_suffix(".waiting")
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Wait for the lock and take it. Raises AutotuneError if a run has it, or too late."""
        if self._file is not None:
            return
        file = _open(self.path)
        try:
            if not self._try_lock(file):
                self._wait(file)
            file.truncate(0)
            user = psutil.Process().username()
            file.write(f"{RUN if self.for_training else SEARCH} (process {os.getpid()} of {user})")
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _try_lock(self, file: TextIO) -> bool:
        """A run lets searches that wait for a turn go first."""
        if self.for_training:
            return not self.has_waiting_search() and _flock(file, fcntl.LOCK_SH)
        return _flock(file, fcntl.LOCK_EX)

    def _wait(self, file: TextIO) -> None:
        holder = self.path.read_text(errors="replace").strip() or f"{SEARCH} (unknown process)"
        is_held_by_run = holder.startswith(RUN) and not self.for_training
        if is_held_by_run and _flock(file, fcntl.LOCK_SH):  # which only runs share
            if self._try_lock(file):
                return  # it has just ended
            hint = "wait, or stop it: it writes a checkpoint, from which `train --resume` continues"
            raise AutotuneError(f"a {holder} uses this device", hint=hint)
        holder = f"{'a' if self.for_training else 'another'} {holder} runs trials on this device"
        self.on_wait(f"{holder}: waiting for {'its end' if self.for_training else 'a turn'}")
        started = time.monotonic()
        with _open(self._waiting) as waiting:
            if not self.for_training:
                _flock(waiting, fcntl.LOCK_SH)
            while not self._try_lock(file):
                if time.monotonic() - started > MAX_WAIT_SECONDS:
                    what = f"{holder} and has not ended in {MAX_WAIT_SECONDS:.0f} s"
                    hint = "wait for it, or stop it: both at once would measure each other"
                    raise AutotuneError(what, hint=hint)
                time.sleep(RETRY_SECONDS)

    def has_waiting_search(self) -> bool:
        """Tell if another process's search waits for the lock."""
        with _open(self._waiting) as waiting:
            return not _flock(waiting, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock; a search that waits for it gets it before this process can again."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        started = time.monotonic()
        while self.has_waiting_search() and time.monotonic() - started < 5 * RETRY_SECONDS:
            time.sleep(RETRY_SECONDS / 4)


@contextlib.contextmanager
def lock_for_run(
    device: Device, num_processes: int, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Keep searches off the devices of a training run: the first `num_processes`, or one."""
    several = device.kind == "cuda" and num_processes > 1
    devices = [device.changed(index=i) for i in range(num_processes)] if several else [device]
    with contextlib.ExitStack() as stack:
        for one in devices:
            lock = DeviceLock(lock_path(one), on_wait, for_training=True)
            lock.acquire()
            stack.callback(lock.release)
        yield


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No links: through one that somebody put into /tmp, any file would be emptied. No O_CREAT
        # for a file that exists: Linux refuses it for another user's file in a shared folder
        # (fs.protected_regular).
        create = 0 if path.exists() else os.O_CREAT
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | create, 0o666)
        with contextlib.suppress(PermissionError):  # another user's, who has done this
            os.fchmod(descriptor, 0o666)
        return os.fdopen(descriptor, "r+")
    except OSError as error:
        what = f"the lock of this device, {path}, cannot be opened: {error.strerror}"
        raise AutotuneError(what, hint="delete that file, or make it writable") from error


def _flock(file: TextIO, mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
