"""The errors that users see: each tells what happened, why, and by a hint what to do.

    AutotuneError            1   something failed
    ├── InvalidInput         2   an argument, a data folder or a model folder that cannot be used
    ├── InvalidPlan          2   a plan file that is not valid, on any machine
    ├── NothingFits          3   no settings can run here
    ├── DoesNotFit           4   a valid plan, but not for this machine
    └── Preempted           75   stopped by a signal with a checkpoint written

The number is the exit status. Any other exception that reaches the user is a bug.
"""

import contextlib
import errno
import functools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def match_names(
    text: str, names: Mapping[str, Iterable[str]], optional: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the keys of `names` that have the name `text`, and those with a name that has all its
    words. Case, spaces, punctuation and `optional` words never matter."""
    noise = re.compile("|".join((r"[\W_]+", *optional)))
    asked = noise.sub("", text.lower())
    same, alike = [], []
    for key, known in names.items():
        words = [[word for word in noise.split(name.lower()) if word] for name in known]
        if any(asked == "".join(each) for each in words if each):
            same.append(key)
        if any(re.fullmatch(f"(?:{'|'.join(each)})+", asked) for each in words if each):
            alike.append(key)
    return same, alike


def suggest_nearest(value: str, known: Iterable[str], listing: str | None = None) -> str:
    """Return a hint for an unknown name: the nearest, and all of them or where they are listed."""
    names = sorted(known)
    near = get_close_matches(value, names, n=1, cutoff=0.6)
    return f"{f'nearest: {near[0]}; ' if near else ''}{listing or 'known: ' + ', '.join(names)}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without the listing that may follow."""
    return str(error).strip().partition("\n")[0]


class AutotuneError(Exception):
    """Base of all errors that autotune raises on purpose; `hint` tells what to do."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str) -> None:
        # A name on disk may be of any bytes; what is printed or sent is not.
        message, hint = (text.encode("utf-8", "replace").decode() for text in (message, hint))
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all attributes, so that they reach another process."""
        return _rebuild, (type(self), vars(self))


def _rebuild(kind: type[AutotuneError], attributes: dict[str, Any]) -> AutotuneError:
    error = kind.__new__(kind, attributes["message"])
    vars(error).update(attributes)
    return error


class InvalidInput(AutotuneError):
    """An argument, a data folder or a model folder cannot be used."""

    exit_status = 2


class InvalidPlan(AutotuneError):
    """A plan file is not valid: damaged, edited where it is frozen, or from a newer autotune."""

    exit_status = 2


class NothingFits(AutotuneError):
    """No settings can run this workload on this machine."""

    exit_status = 3


class DoesNotFit(AutotuneError):
    """The plan is valid but was made for another machine or another class of work."""

    exit_status = 4


class Preempted(AutotuneError):
    """A signal stopped the run; its state is checkpointed."""

    exit_status = 75


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
    """Raise AutotuneError if the disk becomes full while `folder` is written to."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AutotuneError(f"the disk of {folder} is full", hint=hint) from error


# Parts of the messages of errors of other types, in lower case. `alloc_failed`: cuBLAS and cuDNN,
# whose first product on a full card finds no room for a handle. The next three:
# CUDA_ERROR_OUT_OF_MEMORY of the driver, by its name or number, and cudaErrorMemoryAllocation of
# the runtime. The others: C++, loading a library and starting a thread under a memory limit, and
# a convolution of cuDNN that finds no room for any engine (aten/src/ATen/native/cudnn/Conv_v8.cpp).
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


def is_out_of_memory(error: BaseException) -> bool:
    """Tell if the device or the host ran out of memory; torch's own error goes by its name."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True  # libraries wrap what an import raises
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(message in text for message in OUT_OF_MEMORY_MESSAGES)


@contextlib.contextmanager
def reraise_oom() -> Iterator[None]:
    """Raise AutotuneError if memory runs out: for work other than steps, which are retried."""
    try:
        yield
    except Exception as error:
        if isinstance(error, AutotuneError) or not is_out_of_memory(error):
            raise
        raise AutotuneError(
            f"memory ran out: {first_line(error)}",
            hint="close other programs that use memory and run it again, or plan with a larger "
            "reserve: autotune plan --from PLAN --reserve 2GiB",
        ) from error


# What an argument or a file may hold that Python's own functions refuse.
UNUSABLE = {
    "text that is not Unicode": UnicodeError,
    "a number too large": OverflowError,
    "a NUL": ValueError,
}
NUL_MESSAGES = ("embedded null byte", "embedded null character")


def explain_error(error: Exception) -> AutotuneError:
    """Return the exception itself if autotune raised it, else one that says what it means."""
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
    for what, kinds in UNUSABLE.items():
        if isinstance(error, kinds) and (kinds is not ValueError or str(error) in NUL_MESSAGES):
            return InvalidInput(
                f"there is {what} in an argument, a name or a file: {first_line(error)}",
                hint="AUTOTUNE_TRACEBACK=1 shows where it was read",
            )
    absent: BaseException | None = error
    while absent is not None and not isinstance(absent, ImportError):
        absent = absent.__cause__  # libraries wrap what an import raises
    if absent is not None:
        return AutotuneError(
            f"the installation is broken: {first_line(absent)}",
            hint="pip install --upgrade lora-autotune; then see what is wrong: autotune doctor",
        )
    return AutotuneError(
        f"{type(error).__name__}: {first_line(error) or 'no message'}",
        hint=f"{BUG}: please report it, with what `autotune bug-report` shows; "
        "AUTOTUNE_TRACEBACK=1 shows where",
    )


BUG = "this is a bug in autotune"


def raise_typed(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function raise AutotuneError for whatever an argument or a file causes."""

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (OSError, ValueError, OverflowError) as error:
            explained = explain_error(error)
            if explained.hint.startswith(BUG):
                raise
            raise explained from error

    return door
