"""What SIGTERM, SIGINT and SIGHUP do to a run: the first signal takes effect after the step, or at
once if none runs.

With several processes only the first counts, because the launcher sends SIGTERM after an interrupt
from the terminal. Otherwise the previous handlers are restored after it, so that a second signal
ends the process at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autotune.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes when a terminal or connection closes; if it is ignored, as under `nohup`, it
stays ignored."""


@contextlib.contextmanager
def catch_stop_signals(*, second_ends: bool) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the signal that came, or None: for callers that
    finish a step first."""
    came: list[str] = []
    with _handle(came.append, second_ends=second_ends):
        yield lambda: came[-1] if came else None


class _Stopped(BaseException):
    """Not an `Exception`, which libraries catch, like KeyboardInterrupt."""


@contextlib.contextmanager
def preempt_on_signal(*, second_ends: bool) -> Iterator[None]:
    """Stop at once on a signal: for the work after the last step, whose checkpoint is written.

    Raises:
        Preempted: a signal came.
    """
    came: list[str] = []

    def stop(name: str) -> None:
        came.append(name)
        if len(came) == 1:
            raise _Stopped

    try:
        with _handle(stop, second_ends=second_ends):
            yield
    except _Stopped:
        raise Preempted(
            f"stopped by {came[0]} after the last step; its checkpoint is written",
            hint="samples and report are missing: run the same command with --resume",
        ) from None


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Treat each of the signals like Ctrl-C: for work with no step to finish and nothing to write.

    Raises:
        KeyboardInterrupt: a signal came.
    """

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    with _handle(stop, second_ends=True):
        yield


@contextlib.contextmanager
def _handle(on_signal: Callable[[str], None], *, second_ends: bool) -> Iterator[None]:
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handler(number: int, frame: FrameType | None) -> None:
        if second_ends:
            restore()
        on_signal(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before |= {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        restore()
