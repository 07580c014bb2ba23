"""Disk space and memory that run out: errors that tell how to continue, before the work if
possible."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import AutotuneError, first_line


def require_free_disk(folder: Path, needed_bytes: int, what: str, *, hint: str) -> None:
    """Raise AutotuneError if the disk of `folder` has less than `needed_bytes` free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AutotuneError(
            f"{what} needs {needed_bytes / 2**20:,.1f} MiB in {folder}, which has "
            f"{free / 2**20:,.1f} MiB free",
            hint=hint,
        )


@contextlib.contextmanager
def reraise_disk_full(folder: Path, *, hint: str) -> Iterator[None]:
    """Turn a disk that becomes full while `folder` is written to into an error with a hint.

    Raises:
        AutotuneError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AutotuneError(f"the disk of {folder} is full", hint=hint) from error


OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "not enough memory",
    "alloc_failed",
    "error_out_of_memory",
    "errormemoryallocation",
    "err 2 != cuda_success",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "resource temporarily unavailable",
    "unable to find an engine to execute this computation",
)
"""Parts of the messages of errors of other types, in lower case. `alloc_failed`: cuBLAS and
cuDNN, whose first product on a full card finds no room for a handle. The next three:
`CUDA_ERROR_OUT_OF_MEMORY` of the driver, by its name or number, and `cudaErrorMemoryAllocation`
of the runtime. The others: C++, loading a library and starting a thread under a memory limit,
and a convolution of cuDNN that finds no room for the workspace of any engine
(aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_configs`)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory. Imports no torch, whose
    `OutOfMemoryError` goes by its name."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True  # libraries wrap what an import raises
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(message in text for message in OUT_OF_MEMORY_MESSAGES)


@contextlib.contextmanager
def reraise_oom() -> Iterator[None]:
    """Turn running out of memory into an error with a hint: for work other than steps, which are
    retried.

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
            hint="close other programs that use memory and run it again, or plan with a larger "
            "reserve: "
            "autotune plan --from PLAN --reserve 2GiB",
        ) from error


def explain_error(error: Exception) -> AutotuneError:
    """The exception itself if autotune raised it on purpose, else one that says what it means and
    what to do.

    Example:
        >>> try:
        ...     autotune.plan("qwen-image", "photos")
        ... except Exception as error:
        ...     print(autotune.explain_error(error).hint)
    """
    if isinstance(error, AutotuneError):
        return error
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return AutotuneError(
            f"{where}{error.strerror}",
            hint="check the path, its permissions, and the free space on its disk",
        )
    if is_out_of_memory(error):
        hint = "close other programs that use memory, or raise the limit (ulimit -v, -d)"
        return AutotuneError(f"memory ran out: {error}", hint=hint)
    return AutotuneError(
        f"{type(error).__name__}: {first_line(error) or 'no message'}",
        hint="this is a bug in autotune; AUTOTUNE_TRACEBACK=1 shows where. Please report it",
    )
