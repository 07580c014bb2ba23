"""The errors that users see: each tells what happened, why, and by a hint what to do.

    AutotuneError            1   something failed
    ├── InvalidInput         2   an argument, a data folder or a model folder that cannot be used
    ├── InvalidPlan          2   a plan file that is not valid, on any machine
    ├── NothingFits          3   no settings can run here
    ├── DoesNotFit           4   a valid plan, but not for this machine
    └── Preempted           75   stopped by a signal with a checkpoint written

The number is the exit status of the command line. Any other exception that reaches the user is a
bug.
"""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest_nearest(value: str, known: Iterable[str], listing: str | None = None) -> str:
    """A hint for an unknown name: the nearest known one, if any is near, and all of them, or
    where they are listed."""
    names = sorted(known)
    near = get_close_matches(value, names, n=1, cutoff=0.4)
    return f"{f'nearest: {near[0]}; ' if near else ''}{listing or 'known: ' + ', '.join(names)}"


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, without the listing that may follow."""
    return str(error).strip().partition("\n")[0]


class AutotuneError(Exception):
    """Base of all errors that autotune raises on purpose.

    Args:
        message: what happened and why, in one line.
        hint: what to do about it, preferably a command; shown on its own line.

    Example:
        >>> try:
        ...     autotune.train("plan.yaml")
        ... except autotune.AutotuneError as error:
        ...     print(error.message, error.hint, error.exit_status)
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the hint too, so that it reaches another process."""
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[AutotuneError], message: str, hint: str) -> AutotuneError:
    return kind(message, hint=hint)


class InvalidInput(AutotuneError):
    """An argument, a data folder or a model folder cannot be used.

    Example:
        >>> try:
        ...     autotune.check_data("no-such-folder")
        ... except autotune.InvalidInput as error:
        ...     print(error.hint)
    """

    exit_status = 2


class InvalidPlan(AutotuneError):
    """A plan file is not valid: damaged, edited where it is frozen, or from a newer autotune.

    Example:
        >>> try:
        ...     autotune.load_plan("edited.yaml")
        ... except autotune.InvalidPlan as error:
        ...     print(error.message)
    """

    exit_status = 2


class NothingFits(AutotuneError):
    """No settings can run this workload on this machine.

    Example:
        >>> try:
        ...     autotune.plan("qwen-image", hardware="3060", max_memory="1GiB")
        ... except autotune.NothingFits as error:
        ...     print(error.hint)
    """

    exit_status = 3


class DoesNotFit(AutotuneError):
    """The plan is valid but was made for another machine or another class of work.

    Example:
        >>> try:
        ...     autotune.train("plan.yaml")
        ... except autotune.DoesNotFit:
        ...     autotune.train(autotune.plan(earlier="plan.yaml"))
    """

    exit_status = 4


class Preempted(AutotuneError):
    """A signal stopped the run; its state is checkpointed.

    Example:
        >>> try:
        ...     autotune.train("plan.yaml")
        ... except autotune.Preempted:
        ...     autotune.train("plan.yaml", resume=True)
    """

    exit_status = 75
