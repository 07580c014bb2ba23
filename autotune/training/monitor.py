"""Watches a run: memory of each phase, how near it is to the budget, whether it grows, gradients
that stand out, and utilization of the GPU."""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autotune.hardware import EnergyMeter, EnergyReading, mean_watts
from autotune.runtime import device_peak_bytes, host_peak_bytes, reset_host_peak, trim_heap
from autotune.schema import PhasePeak

ALARM_SHARE = 0.85
"""Share of the budget above which one fragmented allocation may end a run."""

PEAK_TOLERANCE = 1.05
"""Factor of the planned peak: a run that was planned to fill its budget causes a warning only
above this.
"""

WINDOW_STEPS = 50
NUM_WINDOWS = 6
LEAK_SHARE = 0.05
"""Growth over `NUM_WINDOWS` windows, each higher than the last, that counts as a leak: as much as
a run may take beyond its promise; a process's memory wavers by less."""

SPIKE_FACTOR = 10.0
"""How many times the median of the steps before a gradient's norm must be to count as a spike."""
SPIKE_WINDOW = 100
MIN_SPIKE_STEPS = 20
"""Steps that the median is taken of, at most and at least."""

NUM_WARMUP_STEPS = 2
"""Number of first steps after a start that do not count as steady ones."""

TRACED_STEPS = range(3, 6)
"""Steps of this start that a trace covers: the ones before them allocate and warm up."""


class PhaseWatch:
    """Measures each phase of a run; a phase that is entered again adds to its time and keeps its
    higher peak.

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
            trim_heap()  # nor is what this one has freed the next one's
            self._reset_peaks()

    def _reset_peaks(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        reset_host_peak()

    def _record(self, name: str, seconds: float) -> None:
        before = self.peaks.get(name) or PhasePeak(
            name=name, seconds=0.0, device_bytes=None, host_bytes=None
        )
        self.peaks[name] = PhasePeak(
            name=name,
            seconds=seconds + before.seconds,
            device_bytes=_known_max(device_peak_bytes(self.device), before.device_bytes),
            host_bytes=_known_max(host_peak_bytes(), before.host_bytes),
        )


def _known_max(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


class MemoryWatch:
    """Checks memory after each step; each warning is given once. `planned_bytes` is the peak
    that the plan expects.
    """

    def __init__(self, budget_bytes: int, planned_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.alarm_bytes = max(ALARM_SHARE * budget_bytes, PEAK_TOLERANCE * planned_bytes)
        self.growth = GrowthWatch()
        self.warned: set[str] = set()

    def check(self, memory_bytes: int, peak_bytes: int) -> str | None:
        """A warning, or None; memory between steps shows a leak, the peak how near the budget
        is.
        """
        slope, found = self.growth.add(memory_bytes), {}
        if peak_bytes > self.alarm_bytes:
            share = peak_bytes / self.budget_bytes
            found["budget"] = (
                f"memory is at {peak_bytes / 2**30:.2f} GiB, {share:.0%} of what a run may take"
            )
        if slope:
            found["leak"] = f"memory grows by {slope / 2**20:.2f} MiB per step"
        new = [warning for name, warning in found.items() if name not in self.warned]
        self.warned |= found.keys()
        return "; ".join(new) or None


class GrowthWatch:
    """Finds readings of memory that grow like a leak."""

    def __init__(self) -> None:
        self.window: list[int] = []
        self.floors: list[int] = []

    def add(self, num_bytes: int) -> float:
        """Count the reading after a step; returns the growth in bytes per step, 0 unless a
        window that ends tells of a leak."""
        self.window.append(num_bytes)
        if len(self.window) < WINDOW_STEPS:
            return 0.0
        self.floors = [*self.floors, min(self.window)][-NUM_WINDOWS:]
        self.window = []
        return leak_bytes_per_step(self.floors)


def leak_bytes_per_step(floors: list[int]) -> float:
    """Median growth between the minima of successive windows, or 0 if it is too small or uneven for
    a leak.

    The median, since a preview raises memory once and for good.
    """
    growth = [later - earlier for earlier, later in pairwise(floors)]
    if len(floors) < NUM_WINDOWS or min(growth) <= 0:
        return 0.0
    median = statistics.median(growth)
    return median / WINDOW_STEPS if median * len(growth) >= floors[0] * LEAK_SHARE else 0.0


class GradientWatch:
    """Counts gradients of a run that stand out: a few are clipped and forgotten, many mean too
    high a learning rate.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        known = state or {"norms": [], "num_spikes": 0, "num_nonfinite": 0}
        self.num_overflows: int = known.get("num_overflows", 0)
        """Gradients that overflowed fp16; their steps were skipped."""
        self.norms: deque[float] = deque(known["norms"], maxlen=SPIKE_WINDOW)
        self.num_spikes: int = known["num_spikes"]
        self.num_nonfinite: int = known["num_nonfinite"]

    def add(self, norm: float | None) -> None:
        """Count the norm of a step's gradient, before clipping; None if it overflowed fp16."""
        if norm is None:
            self.num_overflows += 1
            return
        if len(self.norms) >= MIN_SPIKE_STEPS and norm > SPIKE_FACTOR * statistics.median(
            self.norms
        ):
            self.num_spikes += 1
        self.norms.append(norm)

    def state(self) -> dict[str, Any]:
        """All that the constructor needs to go on, as JSON."""
        counts = {"num_nonfinite": self.num_nonfinite, "num_overflows": self.num_overflows}
        return {"norms": list(self.norms), "num_spikes": self.num_spikes, **counts}


class GpuUtilization:
    """Reads the GPU's utilization once a second: NVML averages over about as long, and a query
    takes milliseconds.
    """

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


class EnergyWatch:
    """What this process's device takes while a start trains."""

    def __init__(self, device: torch.device) -> None:
        self._meter = EnergyMeter(device.type, device.index or 0)
        self._readings: list[EnergyReading | None] = []
        self.watts: float | None = None
        """Mean power from the first steady step on, with previews and validation in between;
        None if not known.
        """
        self.joules: float | None = None
        """Energy of all that the device did; None if it is unknown."""

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """All steps of a start."""
        with self._meter as meter:
            self._readings = [meter.read()]
            yield
            first, last = self._readings[0], meter.read()
        self.watts = mean_watts(self._readings[-1], last)
        self.joules = last.joules - first.joules if first and last else None

    def warmed_up(self) -> None:
        """From here on steps are steady."""
        self._readings.append(self._meter.read())


def profile_steps(
    path: Path | None,
) -> contextlib.AbstractContextManager[torch.profiler.profile | None]:
    """A profiler whose `step` is called after each step of this start; it writes `TRACED_STEPS`
    to `path`.
    """
    if path is None:
        return contextlib.nullcontext()
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=TRACED_STEPS.start - 1, warmup=1, active=len(TRACED_STEPS), repeat=1
        ),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        record_shapes=True,
    )
