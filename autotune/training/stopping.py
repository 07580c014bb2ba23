"""Turns the first SIGTERM or SIGINT into a request that the loop honours after its step; a second one ends at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, `signal_name` tells which signal came.

    `second_ends`: the old handlers are back after the first. Not so among several processes: there an interrupt from
    the terminal is followed by their launcher's SIGTERM.
    """

    def __init__(self, *, second_ends: bool) -> None:
        self.signal_name: str | None = None
        self.second_ends = second_ends
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if self.second_ends:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
