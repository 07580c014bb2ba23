"""A disk that is too small, or becomes full: said before the work where that can be known, else with the way on."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from autotune.errors import AutotuneError


def require_free(folder: Path, needed_bytes: int, what: str, *, hint: str) -> None:
    """Raise AutotuneError where the disk of `folder` has less than `needed_bytes` free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AutotuneError(
            f"{what} needs {needed_bytes / 2**20:,.1f} MiB in {folder}, where {free / 2**20:,.1f} MiB are free",
            hint=hint,
        )


@contextlib.contextmanager
def telling_of_full_disk(folder: Path, *, hint: str) -> Iterator[None]:
    """Whatever is written to `folder` inside: a disk that becomes full is an error that says how to go on.

    Raises:
        AutotuneError: the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number not in (errno.ENOSPC, errno.EDQUOT) and os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise AutotuneError(f"the disk of {folder} became full", hint=hint) from error
