"""Writes files atomically, so that what readers look for is never half written; reads untrusted
ones within limits."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from autotune.errors import InvalidInput
from autotune.system.urls import SCHEME

PART_FILES = f".*.{'[0-9a-f]' * 16}.part"
"""Pattern for files that `atomic_write` was writing when its process was killed."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; what was written there replaces `path` if nothing
    failed.

    The bytes are on disk (fsync) before the name changes, and so is the name, if folders can be
    synced, before this returns.
    """
    part = _new_part(path)
    try:
        yield part
        _sync(part)
        part.replace(path)
        with suppress(OSError):  # some network file systems cannot sync folders
            _sync(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(part):
            raise OSError(
                error.errno, error.strerror, str(path)
            ) from error  # the name that the user knows
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> BinaryIO:
    """Open a file that may be untrusted: reading it never waits, as for a pipe, nor goes on for
    ever, as for a device.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a file that may be untrusted; never more than the limit is held in memory.

    Raises:
        OSError: as `open_regular`, or it is larger.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(
            errno.EFBIG,
            f"larger than the {max_bytes >> 10:,} KiB that are read of such a file",
            str(path),
        )
    return content


def _new_part(path: Path) -> Path:
    if SCHEME.match(str(path)):  # a folder would be made that is called like it, login and all
        raise InvalidInput(
            "files are written to this machine, not to a URL",
            hint="name a file in one of its folders",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if (
        path.exists() and not path.is_file()
    ):  # if /dev/null were replaced, it would be a file for everyone
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the umask
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return part


def require_writable(path: Path) -> None:
    """Check before long work that `atomic_write` will be able to write `path`. Raises OSError if
    it will not."""
    _new_part(path).unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
