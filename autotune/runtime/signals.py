"""What SIGTERM, SIGINT and SIGHUP do to a run: the first is honored after the step, or at once where none are taken.

With several processes only the first counts: an interrupt from the terminal is followed by their launcher's SIGTERM.
Else the old handlers are back after it, so a second one ends at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autotune.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The last one comes where a terminal or a connection is closed; `nohup` has it ignored, and so it stays."""


@contextlib.contextmanager
def catch_stop_signals(*, second_ends: bool) -> Iterator[Callable[[], str | None]]:
    """Yields what tells which signal came, for whoever finishes a step first."""
    came: list[str] = []
    with _heard(came.append, second_ends=second_ends):
        yield lambda: came[-1] if came else None


class _Stopped(BaseException):
    """No `Exception`, as KeyboardInterrupt is none: libraries catch those."""


@contextlib.contextmanager
def preempt_on_signal(*, second_ends: bool) -> Iterator[None]:
    """For what comes after the last step, whose checkpoint is written.

    Raises:
        Preempted: a signal came.
    """
    came: list[str] = []

    def stop(name: str) -> None:
        came.append(name)
        if len(came) == 1:
            raise _Stopped

    try:
        with _heard(stop, second_ends=second_ends):
            yield
    except _Stopped:
        raise Preempted(
            f"stopped by {came[0]} after the last step; its checkpoint is written",
            hint="for what is missing, samples and report, run the same command with --resume",
        ) from None


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Where there is no step to finish and nothing to write: any of the signals is what Ctrl-C is.

    Raises:
        KeyboardInterrupt: one came.
    """

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    with _heard(stop, second_ends=True):
        yield


@contextlib.contextmanager
def _heard(tell: Callable[[str], None], *, second_ends: bool) -> Iterator[None]:
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, frame: FrameType | None) -> None:
        if second_ends:
            restore()
        tell(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before |= {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        restore()
