"""Turns the first SIGTERM or SIGINT into a request that the loop honours after its step; a second one ends at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        before |= {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield lambda: came[-1] if came else None
    finally:
        restore()
