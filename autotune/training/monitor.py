"""Watches a run: memory of each phase, how near it is to the budget, whether it grows, how busy the GPU is."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import torch

from autotune.runtime import device_peak_bytes, host_peak_bytes, reset_host_peak
from autotune.schema import PhasePeak

ALARM_SHARE = 0.85
"""Of the budget: beyond it a run is one fragmented allocation away from its end."""

SURPRISE = 1.05
"""Times the promised peak: a run planned to fill its budget alarms only where it takes more than that."""

WINDOW_STEPS = 50
NUM_WINDOWS = 6
LEAK_SHARE = 0.02
"""Usual growth over `NUM_WINDOWS` windows, each higher than the last, that is called a leak: caches fill unevenly."""


class PhaseWatch:
    """Measures each phase of a run; a phase entered again adds to its time and raises its peak.

    Inside a phase another may be entered: its memory counts for itself alone, its time for both.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, PhasePeak] = {}
        self._entered: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._entered:
            self._count(self._entered[-1], 0.0)
        self._entered.append(name)
        self._reset()
        started = time.monotonic()
        try:
            yield
        finally:
            self._count(self._entered.pop(), time.monotonic() - started)
            self._reset()

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        reset_host_peak()

    def _count(self, name: str, seconds: float) -> None:
        before = self.peaks.get(name)
        self.peaks[name] = PhasePeak(
            name=name,
            seconds=seconds + (before.seconds if before else 0.0),
            device_bytes=_larger(device_peak_bytes(self.device), before.device_bytes if before else None),
            host_bytes=_larger(host_peak_bytes(), before.host_bytes if before else None),
        )


def _larger(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


class MemoryWatch:
    """Looks at the memory after each step; each warning is given once. The promise is the peak that was planned."""

    def __init__(self, budget_bytes: int, promised_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.alarm_bytes = max(ALARM_SHARE * budget_bytes, SURPRISE * promised_bytes)
        self.window: list[int] = []
        self.floors: list[int] = []
        self.given: set[str] = set()

    def look(self, memory_bytes: int, peak_bytes: int) -> str | None:
        """A warning, or None; the memory between steps shows a leak, the peak how near the budget is."""
        self.window.append(memory_bytes)
        if "budget" not in self.given and peak_bytes > self.alarm_bytes:
            self.given.add("budget")
            share = peak_bytes / self.budget_bytes
            return f"memory is at {peak_bytes / 2**30:.2f} GiB, {share:.0%} of what a run may take"
        if len(self.window) < WINDOW_STEPS:
            return None
        self.floors = [*self.floors, min(self.window)][-NUM_WINDOWS:]
        self.window = []
        slope = leak_bytes_per_step(self.floors)
        if "leak" in self.given or not slope:
            return None
        self.given.add("leak")
        return f"memory grows by {slope / 2**20:.2f} MiB per step"


def leak_bytes_per_step(floors: list[int]) -> float:
    """Usual growth from the least memory of one window to the next's, or 0 where that is no leak.

    The median, as a preview raises memory once, to stay.
    """
    growth = [later - earlier for earlier, later in pairwise(floors)]
    if len(floors) < NUM_WINDOWS or min(growth) <= 0:
        return 0.0
    usual = statistics.median(growth)
    return usual / WINDOW_STEPS if usual * len(growth) >= floors[0] * LEAK_SHARE else 0.0


class Utilization:
    """How busy the GPU is, asked once a second: NVML averages over about as long, and asking takes milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[float] = []
        self._asked = -math.inf

    def read(self) -> float | None:
        """The last reading in [0, 1], or None where NVML does not tell."""
        if self.device.type == "cuda" and time.monotonic() - self._asked >= 1:
            self._asked = time.monotonic()
            with contextlib.suppress(Exception):  # no NVML, or a card that does not support it
                self.readings.append(torch.cuda.utilization(self.device) / 100)
        return self.readings[-1] if self.readings else None
