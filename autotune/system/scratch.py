"""Temporary folders that do not stay for ever if their process is killed: the next one that
makes any removes them."""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "autotune-scratch-"
MIN_AGE_SECONDS = 60.0
"""A folder that is younger may not be locked yet."""


def make_scratch_folder(purpose: str) -> "tempfile.TemporaryDirectory[str]":
    """A new folder in the system's temporary one, for as long as this process, or a `with` block,
    lasts.

    The process holds a lock on it, which the system drops however the process dies. Process ids
    would not do: containers that share a temporary folder see other ids. Other hosts may share one
    whose locks do not reach them: only this host's folders are removed.
    """
    own = f"{PREFIX}{platform.node()}-"
    _sweep(Path(tempfile.gettempdir()), own)
    folder = tempfile.TemporaryDirectory(prefix=f"{own}{purpose}-", ignore_cleanup_errors=True)
    descriptor = os.open(folder.name, os.O_RDONLY)
    weakref.finalize(folder, os.close, descriptor)
    _try_lock(descriptor)
    return folder


def _sweep(place: Path, own: str) -> None:
    """Remove this user's folders that no process holds, of those whose names begin with `own`."""
    for path in place.glob(f"{own}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        is_old = found.st_mtime < time.time() - MIN_AGE_SECONDS
        if is_old and found.st_uid == os.getuid() and _try_lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock; then this process does, until the descriptor is
    closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True
