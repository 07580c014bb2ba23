"""The errors that users meet: each says what, why, and a hint that names the mending command.

    AutotuneError            1   something failed
    ├── InvalidInput         2   an argument, a data folder or a model folder that cannot be used
    ├── InvalidPlan          2   a plan file that is not valid, on any machine
    ├── NothingFits          3   no settings can run here
    ├── DoesNotFit           4   a valid plan, but not for this machine
    └── Preempted           75   stopped by a signal with a checkpoint written

The number is the exit status of the command line. Anything else that escapes is a bug.
"""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest_nearest(value: str, known: Iterable[str], listing: str | None = None) -> str:
    """A hint for a name that is not known: the nearest that is, if one is near, and all, or where they are listed."""
    names = sorted(known)
    near = get_close_matches(value, names, n=1, cutoff=0.4)
    return f"{f'nearest: {near[0]}; ' if near else ''}{listing or 'known: ' + ', '.join(names)}"


def first_line(error: BaseException) -> str:
    """What a library's error says, without the listing that may follow."""
    return str(error).strip().partition("\n")[0]


class AutotuneError(Exception):
    """Base of all errors that autotune raises on purpose.

    Args:
        message: what happened and why, in one line.
        hint: what to do about it, best a command; shown on a line of its own.
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip between processes with the hint intact."""
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[AutotuneError], message: str, hint: str) -> AutotuneError:
    return kind(message, hint=hint)


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
    """The run was told to stop; what it had is checkpointed."""

    exit_status = 75
