"""Watches the memory of a card that has its own, for what no error tells: memory that the driver
moved to the host, an allocator that ran out and started over, and reserved memory that grows."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.hardware import NO_SPILL, shares_host_memory
from autotune.schema import FrozenPart, HardwareProfile
from autotune.training.monitor import GrowthWatch

SPILL_FACTOR = 3.0
"""A step this many times slower than measured has left the device's memory: spilling costs 5 to
20 times.
"""
NEAR_FULL = 0.9
"""Share of a card's memory, taken by whomever, above which slow steps may be slow for want of
it.
"""
SPILL_STEPS = 5
"""Steps that must be slow in their median: one alone waits for a disk or another program."""
EXPANDABLE = (
    "plan again with segments that grow: autotune plan --from PLAN --pin allocator=expandable"
)
MORE_TO_SPARE = "plan again with more to spare: autotune plan --from PLAN --reserve 2GiB"


@dataclass(frozen=True)
class CardReading:
    """What a card and torch's allocator say of memory now."""

    used_share: float
    """Share of the card's memory that this process and others take."""
    reserved_bytes: int
    """What the allocator holds of it, for tensors or in reserve."""
    allocator_retries: int
    """How often so far it ran out, gave back what it had in reserve, and asked again."""


def allocator_retries(device: torch.device) -> int:
    """How often the allocator of a device ran out and started over so far; 0 for devices that do
    not count.
    """
    return (
        int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
        if device.type == "cuda"
        else 0
    )


def card_reader(device: torch.device) -> Callable[[], CardReading | None]:
    """A function that reads the memory of a CUDA device; of any other it reads None."""

    def read() -> CardReading | None:
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        return CardReading(
            1 - free / total, torch.cuda.memory_reserved(device), allocator_retries(device)
        )

    return read


class CardMemoryWatch:
    """Checks a card's memory after each step; each warning is given once."""

    def __init__(
        self,
        read: Callable[[], CardReading | None] = lambda: None,
        planned_seconds: float = float("inf"),
        *,
        can_spill: bool = False,
        allocator: str = "default",
    ) -> None:
        """`planned_seconds` is what a step should take, infinite if nobody measured it;
        `can_spill` whether the driver moves memory to the host; `allocator` the choice of that
        knob."""
        self.read, self.planned_seconds, self.can_spill, self.allocator = (
            read,
            planned_seconds,
            can_spill,
            allocator,
        )
        self._seconds: deque[float] = deque(maxlen=SPILL_STEPS)
        self._growth_watch = GrowthWatch()
        self._told: set[str] = set()
        self._known_retries = 0

    @classmethod
    def of_device(
        cls, device: torch.device, hardware: HardwareProfile, frozen: FrozenPart
    ) -> "CardMemoryWatch":
        """The watch of a run's device. A prediction that nothing was measured for is no
        reference for slow steps.
        """
        if shares_host_memory(hardware.device.memory_kind):
            return cls()
        expected, system = frozen.expected, hardware.host.memory_model
        planned_seconds = expected.step_seconds if expected.evidence == "measured" else math.inf
        allocator = (
            "expandable" if system == "windows" else frozen.settings.allocator
        )  # which has no other
        can_spill = system in ("wsl", "windows")
        return cls(card_reader(device), planned_seconds, can_spill=can_spill, allocator=allocator)

    def check(self, step_seconds: float) -> str | None:
        """A warning after a step of so many seconds without waiting for data, or None."""
        reading = self.read()
        if reading is None:
            return None
        self._seconds.append(step_seconds)
        checks = {"retries": self._retries, "spill": self._spill, "reserved": self._growth}
        found = {name: warning for name, find in checks.items() if (warning := find(reading))}
        new = [warning for name, warning in found.items() if name not in self._told]
        self._told |= found.keys()
        return "; ".join(new) or None

    def start(self) -> None:
        """Steps begin: what the allocator went through before them, in caching and loading, says
        nothing of them.
        """
        reading = self.read()
        self._known_retries = reading.allocator_retries if reading else 0

    def restart(self) -> None:
        """Steps go on with other settings, whose speed nobody measured; that memory ran out is
        told already.
        """
        self.planned_seconds = math.inf
        self.start()

    def _retries(self, reading: CardReading) -> str | None:
        known, self._known_retries = self._known_retries, reading.allocator_retries
        if reading.allocator_retries <= known:
            return None
        return (
            "the allocator ran out of memory and started over: steps wait for it, and may "
            "fail; "
            f"{MORE_TO_SPARE}"
        )

    def _spill(self, reading: CardReading) -> str | None:
        is_full = len(self._seconds) == SPILL_STEPS and reading.used_share >= NEAR_FULL
        ratio = statistics.median(self._seconds) / self.planned_seconds
        if not (self.can_spill and is_full and ratio >= SPILL_FACTOR):
            return None
        why = (
            f"with {reading.used_share:.0%} of the card's memory taken the driver moves memory "
            "to "
            "the host"
        )
        return (
            f"steps take {ratio:.1f} times what was planned: {why}; {NO_SPILL}, and {MORE_TO_SPARE}"
        )

    def _growth(self, reading: CardReading) -> str | None:
        if not (slope := self._growth_watch.add(reading.reserved_bytes)):
            return None
        return (
            f"reserved memory grows by {slope / 2**20:.2f} MiB per step; if no leak is reported, "
            "it is fragmented: "
            f"{EXPANDABLE if self.allocator == 'default' else MORE_TO_SPARE}"
        )
