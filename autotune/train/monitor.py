"""Watches a run from inside its process: memory of each phase, how near it is to the budget and
whether it grows, a card whose driver moves memory to the host, gradients that stand out, time spent
waiting for data, utilization of the GPU."""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch

from autotune.machine.doctor import NO_SPILL
from autotune.plan.candidate import PhasePeak
from autotune.plan.hardware import HardwareProfile, shares_host_memory
from autotune.plan.plan import FrozenPart
from autotune.system.memory import (
    allocated_bytes,
    device_peak_bytes,
    host_peak_bytes,
    reset_host_peak,
    trim_heap,
)

ALARM_SHARE = 0.85
"""Share of the budget above which one fragmented allocation may end a run."""

PEAK_TOLERANCE = 1.05
"""Factor of the planned memory: a run that was planned to fill its budget causes a warning only
above this."""

WINDOW_STEPS = 50
NUM_WINDOWS = 6
LEAK_SHARE = 0.05
"""Growth over `NUM_WINDOWS` windows, each higher than the last, that counts as a leak: as much as
a run may take beyond its promise; a process's memory wavers by less."""

SPILL_FACTOR = 3.0
"""A step this many times slower than measured has left the device's memory: spilling costs 5 to
20 times."""
NEAR_FULL = 0.9
"""Share of a card's memory, taken by whomever, above which slow steps may be slow for want of
it."""
SPILL_STEPS = 5
"""Steps that must be slow in their median: one alone waits for a disk or another program."""

SPIKE_FACTOR = 10.0
"""How many times the median of the steps before a gradient's norm must be to count as a spike."""
SPIKE_WINDOW = 100
MIN_SPIKE_STEPS = 20
"""Steps that the median is taken of, at most and at least."""

NUM_WARMUP_STEPS = 2
"""Number of first steps after a start that do not count as steady ones."""

TRACED_STEPS = range(3, 6)
"""Steps of this start that a trace covers: the ones before them allocate and warm up."""

EXPANDABLE = (
    "plan again with segments that grow: autotune plan --from PLAN --pin allocator=expandable"
)
MORE_TO_SPARE = "plan again with more to spare: autotune plan --from PLAN --reserve 2GiB"


@dataclass(frozen=True)
class MemoryReading:
    """What a device, and torch's allocator on it, say of memory between two steps."""

    held_bytes: int
    """What tensors hold; on a CPU what the process does."""
    peak_bytes: int
    """The most so far that the allocator reserved; on a CPU what the process holds."""
    reserved_bytes: int | None = None
    """What the allocator holds, for tensors or in reserve; None for devices that do not tell."""
    allocator_retries: int | None = None
    """How often so far it ran out, gave back what it had in reserve, and asked again."""
    used_share: float = 0.0
    """Share of the card's memory that this process and others take."""


def allocator_retries(device: torch.device) -> int:
    """How often the allocator of a device ran out and started over so far; 0 for devices that do
    not count."""
    is_cuda = device.type == "cuda"
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if is_cuda else 0


def read_memory(device: torch.device) -> MemoryReading:
    """The memory of a device now."""
    held = allocated_bytes(device)
    if device.type != "cuda":
        return MemoryReading(held, max(held, device_peak_bytes(device) or 0))
    free, total = torch.cuda.mem_get_info(device)
    return MemoryReading(
        held,
        torch.cuda.max_memory_reserved(device),
        torch.cuda.memory_reserved(device),
        allocator_retries(device),
        1 - free / total,
    )


class Monitor:
    """What a run's process watches; each warning is given once.

    Args:
        device: where it trains.
        budget_bytes: what a run may take of it.
        planned_bytes: what the plan expects it to take.
        planned_seconds: what a step should take; infinite if nobody measured it.
        can_spill: whether the driver moves memory to the host.
        allocator: the setting of that name.
        read: reads the device's memory.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        budget_bytes: int = 2**62,
        planned_bytes: int = 0,
        planned_seconds: float = math.inf,
        can_spill: bool = False,
        allocator: str = "default",
        read: Callable[[], MemoryReading] | None = None,
    ) -> None:
        self.device, self.budget_bytes, self.planned_seconds = device, budget_bytes, planned_seconds
        self.alarm_bytes = max(ALARM_SHARE * budget_bytes, PEAK_TOLERANCE * planned_bytes)
        self.can_spill, self.allocator = can_spill, allocator
        self.read = read or (lambda: read_memory(device))
        self.peaks: dict[str, PhasePeak] = {}
        self.seconds: list[float] = []
        """Of the steps of this start."""
        self.data_seconds: list[float] = []
        """What of them was spent waiting for data."""
        self.utilization: list[float] = []
        """Readings of the GPU's utilization, in [0, 1]."""
        self.norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.num_spikes = self.num_nonfinite = self.num_overflows = 0
        """Gradients that stood out, were not finite, or overflowed fp16 in all starts of the run:
        a few are clipped and forgotten, many mean too high a learning rate."""
        self._nested: list[str] = []
        self._growth, self._reserved_growth = Growth(), Growth()
        self._computing: deque[float] = deque(maxlen=SPILL_STEPS)
        self._known_retries = 0
        self._told: set[str] = set()
        self._utilization_read_at = -math.inf

    @classmethod
    def of_run(cls, device: torch.device, hardware: HardwareProfile, frozen: FrozenPart) -> Self:
        """The monitor of a plan's run. A prediction that nothing was measured for is no reference
        for slow steps."""
        expected, system = frozen.expected, hardware.host.memory_model
        has_own_memory = not shares_host_memory(hardware.device.memory_kind)
        return cls(
            device,
            budget_bytes=hardware.device.budget_bytes,
            planned_bytes=expected.run_memory_bytes,
            planned_seconds=expected.step_seconds if expected.evidence == "measured" else math.inf,
            can_spill=has_own_memory and system in ("wsl", "windows"),
            # Windows has no other
            allocator="expandable" if system == "windows" else frozen.settings.allocator,
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; one that is entered again adds to its time and keeps its higher peak.

        Phases may nest: memory counts for the innermost phase alone, time for all of them.
        """
        if self._nested:
            self._record(self._nested[-1], 0.0)
        self._nested.append(name)
        self._reset_peaks()  # what earlier work has freed is not this phase's
        started = time.monotonic()
        try:
            yield
        finally:
            self._record(self._nested.pop(), time.monotonic() - started)
            self._reset_peaks()  # nor is what this one has freed the next one's

    def _reset_peaks(self) -> None:
        trim_heap()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        reset_host_peak()

    def _record(self, name: str, seconds: float) -> None:
        before = self.peaks.get(name)
        bytes_now = {
            "device_bytes": device_peak_bytes(self.device),
            "host_bytes": host_peak_bytes(),
        }
        for field, now in bytes_now.items() if before else ():
            known = [size for size in (now, getattr(before, field)) if size is not None]
            bytes_now[field] = max(known, default=None)
        seconds += before.seconds if before else 0.0
        self.peaks[name] = PhasePeak(name=name, seconds=seconds, **bytes_now)

    def start(self) -> None:
        """Steps begin: what the allocator went through before them, in caching and loading, says
        nothing of them."""
        self._known_retries = self.read().allocator_retries or 0

    def restart(self) -> None:
        """Steps go on with other settings, whose speed nobody measured; that memory ran out is
        told already."""
        self.planned_seconds = math.inf
        self.start()

    def check(self, reading: MemoryReading, seconds: float, data_seconds: float) -> list[str]:
        """New warnings after a step of so many seconds, some of which it waited for data."""
        self.seconds.append(seconds)
        self.data_seconds.append(data_seconds)
        self._computing.append(seconds - data_seconds)
        found: dict[str, str] = {}
        if reading.peak_bytes > self.alarm_bytes:
            share = reading.peak_bytes / self.budget_bytes
            size = f"{reading.peak_bytes / 2**30:.2f} GiB"
            found["budget"] = f"memory is at {size}, {share:.0%} of what a run may take"
        if slope := self._growth.add(reading.held_bytes):
            found["growth"] = f"memory grows by {slope / 2**20:.2f} MiB per step"
        known, self._known_retries = self._known_retries, reading.allocator_retries or 0
        if self._known_retries > known:
            found["retries"] = (
                "the allocator ran out of memory and started over: steps wait for it, and may "
                f"fail; {MORE_TO_SPARE}"
            )
        is_full = len(self._computing) == SPILL_STEPS and reading.used_share >= NEAR_FULL
        ratio = statistics.median(self._computing) / self.planned_seconds
        if self.can_spill and is_full and ratio >= SPILL_FACTOR:
            found["spill"] = (
                f"steps take {ratio:.1f} times what was planned: with {reading.used_share:.0%} of "
                "the GPU's memory taken the driver moves memory to the host; "
                f"{NO_SPILL}, and {MORE_TO_SPARE}"
            )
        if slope := self._reserved_growth.add(reading.reserved_bytes or 0):
            found["reserved"] = (
                f"reserved memory grows by {slope / 2**20:.2f} MiB per step; if no leak is "
                "reported, it is fragmented: "
                f"{EXPANDABLE if self.allocator == 'default' else MORE_TO_SPARE}"
            )
        new = [text for name, text in found.items() if name not in self._told]
        self._told |= found.keys()
        return new

    def add_gradient(self, norm: float | None) -> None:
        """Count the norm of a step's gradient, before clipping; None if it overflowed fp16."""
        if norm is None:
            self.num_overflows += 1
            return
        is_known = len(self.norms) >= MIN_SPIKE_STEPS
        self.num_spikes += is_known and norm > SPIKE_FACTOR * statistics.median(self.norms)
        self.norms.append(norm)

    def gradient_state(self) -> dict[str, Any]:
        """All that `load_gradient_state` needs to go on, as JSON."""
        names = ("num_spikes", "num_nonfinite", "num_overflows")
        return {"norms": list(self.norms), **{name: getattr(self, name) for name in names}}

    def load_gradient_state(self, state: dict[str, Any]) -> None:
        self.norms.extend(state["norms"])
        self.num_spikes, self.num_nonfinite = state["num_spikes"], state["num_nonfinite"]
        self.num_overflows = state["num_overflows"]

    def gpu_utilization(self) -> float | None:
        """The last reading, or None without NVML, which averages over about a second; a query
        takes milliseconds."""
        if self.device.type == "cuda" and time.monotonic() - self._utilization_read_at >= 1:
            self._utilization_read_at = time.monotonic()
            with contextlib.suppress(Exception):  # no NVML, or a GPU that does not support it
                self.utilization.append(torch.cuda.utilization(self.device) / 100)
        return self.utilization[-1] if self.utilization else None


class Growth:
    """Finds readings of memory that grow like a leak."""

    def __init__(self) -> None:
        self.window: list[int] = []
        self.floors: list[int] = []

    def add(self, num_bytes: int) -> float:
        """Count the reading after a step; returns the growth in bytes per step if a window that
        ends tells of a leak, else 0.

        It is the median growth between the minima of windows, since a preview raises memory once
        and for good.
        """
        self.window.append(num_bytes)
        if len(self.window) < WINDOW_STEPS:
            return 0.0
        self.floors = [*self.floors, min(self.window)][-NUM_WINDOWS:]
        self.window = []
        growth = [later - earlier for earlier, later in pairwise(self.floors)]
        if len(self.floors) < NUM_WINDOWS or min(growth) <= 0:
            return 0.0
        median = statistics.median(growth)
        is_leak = median * len(growth) >= self.floors[0] * LEAK_SHARE
        return median / WINDOW_STEPS if is_leak else 0.0


def profile_steps(
    path: Path | None,
) -> contextlib.AbstractContextManager[torch.profiler.profile | None]:
    """A profiler whose `step` is called after each step of this start; it writes `TRACED_STEPS`
    to `path`."""
    if path is None:
        return contextlib.nullcontext()
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=TRACED_STEPS.start - 1, warmup=1, active=len(TRACED_STEPS), repeat=1
        ),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        record_shapes=True,
    )
