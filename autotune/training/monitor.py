"""Watches a run: memory of each phase, how near it is to the budget, whether it grows, and utilization of the GPU."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import torch

from autotune.runtime import device_peak_bytes, host_peak_bytes, reset_host_peak, trim_heap
from autotune.schema import PhasePeak

ALARM_SHARE = 0.85
"""Share of the budget above which one fragmented allocation may end a run."""

PEAK_TOLERANCE = 1.05
"""Factor of the planned peak: a run that was planned to fill its budget causes a warning only above this."""

WINDOW_STEPS = 50
NUM_WINDOWS = 6
LEAK_SHARE = 0.02
"""Growth over `NUM_WINDOWS` windows, each higher than the last, that counts as a leak: caches fill unevenly."""


class PhaseWatch:
    """Measures each phase of a run; a phase that is entered again adds to its time and keeps its higher peak.

    Phases may nest: memory counts for the innermost phase alone, time for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, PhasePeak] = {}
        self._nested: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._nested:
            self._record(self._nested[-1], 0.0)
        self._nested.append(name)
        trim_heap()  # what earlier work has freed is not this phase's
        self._reset_peaks()
        started = time.monotonic()
        try:
            yield
        finally:
            self._record(self._nested.pop(), time.monotonic() - started)
            self._reset_peaks()

    def _reset_peaks(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        reset_host_peak()

    def _record(self, name: str, seconds: float) -> None:
        before = self.peaks.get(name) or PhasePeak(name=name, seconds=0.0, device_bytes=None, host_bytes=None)
        self.peaks[name] = PhasePeak(
            name=name,
            seconds=seconds + before.seconds,
            device_bytes=_known_max(device_peak_bytes(self.device), before.device_bytes),
            host_bytes=_known_max(host_peak_bytes(), before.host_bytes),
        )


def _known_max(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


class MemoryWatch:
    """Checks memory after each step; each warning is given once. `planned_bytes` is the peak that the plan expects."""

    def __init__(self, budget_bytes: int, planned_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.alarm_bytes = max(ALARM_SHARE * budget_bytes, PEAK_TOLERANCE * planned_bytes)
        self.window: list[int] = []
        self.floors: list[int] = []
        self.warned: set[str] = set()

    def check(self, memory_bytes: int, peak_bytes: int) -> str | None:
        """A warning, or None; memory between steps shows a leak, the peak how near the budget is."""
        self.window.append(memory_bytes)
        if "budget" not in self.warned and peak_bytes > self.alarm_bytes:
            self.warned.add("budget")
            share = peak_bytes / self.budget_bytes
            return f"memory is at {peak_bytes / 2**30:.2f} GiB, {share:.0%} of what a run may take"
        if len(self.window) < WINDOW_STEPS:
            return None
        self.floors = [*self.floors, min(self.window)][-NUM_WINDOWS:]
        self.window = []
        slope = leak_bytes_per_step(self.floors)
        if "leak" in self.warned or not slope:
            return None
        self.warned.add("leak")
        return f"memory grows by {slope / 2**20:.2f} MiB per step"


def leak_bytes_per_step(floors: list[int]) -> float:
    """Median growth between the minima of successive windows, or 0 if it is too small or uneven for a leak.

    The median, since a preview raises memory once and for good.
    """
    growth = [later - earlier for earlier, later in pairwise(floors)]
    if len(floors) < NUM_WINDOWS or min(growth) <= 0:
        return 0.0
    median = statistics.median(growth)
    return median / WINDOW_STEPS if median * len(growth) >= floors[0] * LEAK_SHARE else 0.0


class GpuUtilization:
    """Reads the GPU's utilization once a second: NVML averages over about as long, and a query takes milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[float] = []
        self._read_at = -math.inf

    def read(self) -> float | None:
        """The last reading in [0, 1], or None without NVML."""
        if self.device.type == "cuda" and time.monotonic() - self._read_at >= 1:
            self._read_at = time.monotonic()
            with contextlib.suppress(Exception):  # no NVML, or a GPU that does not support it
                self.readings.append(torch.cuda.utilization(self.device) / 100)
        return self.readings[-1] if self.readings else None
