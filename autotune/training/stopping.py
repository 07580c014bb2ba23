"""Turns the first SIGTERM, SIGINT or SIGHUP into a request that the loop honours after its step; the second ends it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The last one comes where a terminal or a connection is closed; `nohup` has it ignored, and so it stays."""


@contextlib.contextmanager
def stop_requests(*, second_ends: bool) -> Iterator[Callable[[], str | None]]:
    """Yields what tells which signal came.

    `second_ends`: the old handlers are back after the first. Not so among several processes: there an interrupt from
    the terminal is followed by their launcher's SIGTERM.
    """
    came: list[str] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number).name)
        if second_ends:
            restore()

    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before |= {number: signal.signal(number, note) for number in heeded}
    try:
        yield lambda: came[-1] if came else None
    finally:
        restore()
