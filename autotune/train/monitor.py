"""Watches a run from inside its process: memory, slow steps, gradients, waits for data."""

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

from autotune.machine import doctor
from autotune.plan.candidate import PhasePeak
from autotune.plan.hardware import Device, shares_host_memory
from autotune.plan.plan import FrozenPart
from autotune.system import memory

ALARM_SHARE = 0.85  # share of the budget above which one fragmented allocation may end a run
# Runs planned to fill their budget cause a warning only this far above the plan.
PEAK_TOLERANCE = 1.05
WINDOW_STEPS = 50
NUM_WINDOWS = 6
# Growth over all windows, each higher than the last, that counts as a leak: a process's memory
# wavers by less.
LEAK_SHARE = 0.05
SPILL_FACTOR = 3.0  # spilling to the host makes steps 5 to 20 times slower
# Share of a card's memory, taken by whomever, above which steps may be slow for want of it.
NEAR_FULL = 0.9
SPILL_STEPS = 5  # the median counts: one step alone waits for a disk or another program
SPIKE_FACTOR = 10.0  # norms this many times the median of the steps before are spikes
SPIKE_WINDOW = 100
MIN_SPIKE_STEPS = 20
NUM_WARMUP_STEPS = 2  # first steps of a start that do not count as steady
TRACED_STEPS = range(3, 6)  # the steps before them allocate and warm up
RETRIES = "the allocator ran out of memory and started over: steps wait for it, and may fail"
EXPANDABLE = "grow its segments: autotune plan --from PLAN --pin allocator=expandable"
MORE_TO_SPARE = "plan again with more to spare: autotune plan --from PLAN --reserve 2GiB"


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a device between two steps, as torch's allocator sees it."""

    held_bytes: int  # by tensors; on a CPU by the process
    peak_bytes: int  # reserved by the allocator; on a CPU held by the process
    reserved_bytes: int | None = None
    # How often the allocator ran out, gave back its reserve, and asked again.
    allocator_retries: int | None = None
    used_share: float = 0.0  # of the card's memory, by this process and others


def allocator_retries(device: torch.device) -> int:
    """Return how often the allocator of a device ran out and started over so far."""
    is_cuda = device.type == "cuda"
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if is_cuda else 0


def read_memory(device: torch.device) -> MemoryReading:
    """Read a device's memory now."""
    held = memory.allocated_bytes(device)
    if device.type != "cuda":
        return MemoryReading(held, max(held, memory.device_peak_bytes(device) or 0))
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
    return MemoryReading(held, peak, reserved, allocator_retries(device), 1 - free / total)


class Monitor:
    """Measurements and warnings of a run's process; each warning is given once."""

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
        self.norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        # In all starts of the run: a few are clipped and forgotten, many mean too high a rate.
        self.num_spikes = self.num_nonfinite = self.num_overflows = 0
        self._held_bytes = 0  # the most after a step of the current phase
        self._nested: list[str] = []
        self._growth, self._reserved_growth = Growth(), Growth()
        self._computing: deque[float] = deque(maxlen=SPILL_STEPS)
        self._known_retries = 0
        self._told: set[str] = set()
        self._utilization: float | None = None  # in [0, 1]
        self._utilization_read_at = -math.inf

    @classmethod
    def of_run(cls, device: torch.device, here: Device, system: str, frozen: FrozenPart) -> Self:
        expected, has_own_memory = frozen.expected, not shares_host_memory(here.memory_kind)
        return cls(
            device,
            budget_bytes=here.budget_bytes,
            planned_bytes=expected.run_memory_bytes,
            planned_seconds=expected.step_seconds if expected.evidence == "measured" else math.inf,
            can_spill=has_own_memory and system in ("wsl", "windows"),
            # Windows has no other
            allocator="expandable" if system == "windows" else frozen.settings.allocator,
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; nested memory counts for the innermost phase alone, time for all."""
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
        self._held_bytes = 0
        memory.trim_heap()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what suited other work leaves holes in this
            torch.cuda.reset_peak_memory_stats(self.device)
        memory.reset_host_peak()

    def _record(self, name: str, seconds: float) -> None:
        device_bytes, host_bytes = memory.device_peak_bytes(self.device), memory.host_peak_bytes()
        if device_bytes is None:  # else steps might have told of more than the phase took
            host_bytes = max(host_bytes, self._held_bytes)
        if before := self.peaks.get(name):
            seconds += before.seconds
            if device_bytes is not None:
                device_bytes = max(device_bytes, before.device_bytes or 0)
            host_bytes = max(host_bytes, before.host_bytes or 0)
        self.peaks[name] = PhasePeak(
            name=name, seconds=seconds, device_bytes=device_bytes, host_bytes=host_bytes
        )

    def start(self) -> None:
        self._known_retries = self.read().allocator_retries or 0

    def restart(self) -> None:
        self.planned_seconds = math.inf
        self.start()

    def check(self, reading: MemoryReading, seconds: float, data_seconds: float) -> list[str]:
        """Return new warnings after a step of so many seconds, some of which it waited for data."""
        self._computing.append(seconds - data_seconds)
        self._held_bytes = max(self._held_bytes, reading.held_bytes)
        found: dict[str, str] = {}
        if reading.peak_bytes > self.alarm_bytes:
            share = reading.peak_bytes / self.budget_bytes
            size = f"{reading.peak_bytes / 2**30:.2f} GiB"
            found["budget"] = f"memory is at {size}, {share:.0%} of what a run may take"
        if slope := self._growth.add(reading.held_bytes):
            found["growth"] = f"memory grows by {slope / 2**20:.2f} MiB per step"
        known, self._known_retries = self._known_retries, reading.allocator_retries or 0
        if self._known_retries > known:
            found["retries"] = f"{RETRIES}; {MORE_TO_SPARE}"
        is_full = len(self._computing) == SPILL_STEPS and reading.used_share >= NEAR_FULL
        ratio = statistics.median(self._computing) / self.planned_seconds
        if self.can_spill and is_full and ratio >= SPILL_FACTOR:
            slow = f"steps take {ratio:.1f} times what was planned"
            why = f"with {reading.used_share:.0%} of the GPU's memory taken the driver moves memory"
            found["spill"] = f"{slow}: {why} to system RAM; {doctor.NO_SPILL}, and {MORE_TO_SPARE}"
        if slope := self._reserved_growth.add(reading.reserved_bytes or 0):
            grows = f"reserved memory grows by {slope / 2**20:.2f} MiB per step"
            hint = EXPANDABLE if self.allocator == "default" else MORE_TO_SPARE
            found["reserved"] = f"{grows}; if no leak is reported, it is fragmented: {hint}"
        new = [text for name, text in found.items() if name not in self._told]
        self._told |= found.keys()
        return new

    def add_gradient(self, norm: float | None) -> None:
        """Count the norm of a step's gradient before clipping; None if it overflowed fp16."""
        if norm is None:
            self.num_overflows += 1
            return
        is_known = len(self.norms) >= MIN_SPIKE_STEPS
        self.num_spikes += is_known and norm > SPIKE_FACTOR * statistics.median(self.norms)
        self.norms.append(norm)

    def gradient_state(self) -> dict[str, Any]:
        names = ("num_spikes", "num_nonfinite", "num_overflows")
        return {"norms": list(self.norms), **{name: getattr(self, name) for name in names}}

    def load_gradient_state(self, state: dict[str, Any]) -> None:
        self.norms.extend(state["norms"])
        self.num_spikes, self.num_nonfinite = state["num_spikes"], state["num_nonfinite"]
        self.num_overflows = state["num_overflows"]

    def gpu_utilization(self) -> float | None:
        """Return NVML's last reading, an average over a second; a query takes milliseconds."""
        if self.device.type == "cuda" and time.monotonic() - self._utilization_read_at >= 1:
            self._utilization_read_at = time.monotonic()
            with contextlib.suppress(Exception):  # no NVML, or a GPU that does not support it
                self._utilization = torch.cuda.utilization(self.device) / 100
        return self._utilization


class Growth:
    """Readings of memory that may grow like a leak."""

    def __init__(self) -> None:
        self.window: list[int] = []
        self.floors: list[int] = []

    def add(self, num_bytes: int) -> float:
        """Count a step's reading; return a leak's bytes per step, or 0."""
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
    """Make a profiler that writes `TRACED_STEPS` of this start to `path`, if there is one."""
    if path is None:
        return contextlib.nullcontext()
    first, number = TRACED_STEPS.start, len(TRACED_STEPS)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=number, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        record_shapes=True,
    )
