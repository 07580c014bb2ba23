"""Disk or memory that runs short: said before the work where that can be known, else with the way on."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import AutotuneError, first_line


def require_free(folder: Path, needed_bytes: int, what: str, *, hint: str) -> None:
    """Raise AutotuneError where the disk of `folder` has less than `needed_bytes` free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AutotuneError(
            f"{what} needs {needed_bytes / 2**20:,.1f} MiB in {folder}, where {free / 2**20:,.1f} MiB are free",
            hint=hint,
        )


@contextlib.contextmanager
def reraise_disk_full(folder: Path, *, hint: str) -> Iterator[None]:
    """Whatever is written to `folder` inside: a disk that becomes full is an error that says how to go on.

    Raises:
        AutotuneError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AutotuneError(f"the disk of {folder} became full", hint=hint) from error


OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "resource temporarily unavailable",
    "unable to find an engine to execute this computation",
)
"""What errors of other types say then, in lower case. `alloc_failed`: cuBLAS and cuDNN, whose first product at the edge
of a card finds no room for a handle; the last three: loading a library and starting a thread under a cap on memory, and
a convolution of cuDNN that finds no room for the workspace of any engine (aten/src/ATen/native/cudnn/Conv_v8.cpp,
`try_configs`)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or the host, ran out."""
    import torch

    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in text for words in OUT_OF_MEMORY)


@contextlib.contextmanager
def reraise_oom() -> Iterator[None]:
    """Whatever a run does outside of steps that can be taken again: encoding, loading, saving, samples.

    Raises:
        AutotuneError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AutotuneError) or not is_out_of_memory(error):
            raise
        raise AutotuneError(
            f"memory ran out: {first_line(error)}",
            hint="close what else takes memory and run it again, or plan with more to spare: "
            "autotune plan --from PLAN --reserve 2GiB",
        ) from error
