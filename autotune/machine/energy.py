"""How much energy a GPU takes: NVML's counter or, on cards without one, its power sampled and
summed up.

NVML speaks of the whole card: nothing is told while several processes compute on it, nor of a slice
of one.
"""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from autotune.machine.sources import RealSystem
from autotune.machine.system import System, Unavailable
from autotune.plan.hardware import Device

SAMPLE_SECONDS = 0.05
"""Between readings of power."""


@dataclass(frozen=True)
class EnergyReading:
    """What a card has taken since some moment; only differences mean anything."""

    seconds: float
    """When it was read, by a monotonic clock."""
    joules: float


def mean_watts(first: EnergyReading | None, last: EnergyReading | None) -> float | None:
    """Mean power between two readings; None if one is missing, or nothing was counted between
    them."""
    if (
        first is None
        or last is None
        or last.seconds <= first.seconds
        or last.joules <= first.joules
    ):
        return None
    return (last.joules - first.joules) / (last.seconds - first.seconds)


def joules_per_image(
    watts: float | None, step_seconds: float, images_per_step: int
) -> float | None:
    """Energy of an image at a mean power; None if that is not known."""
    return watts and watts * step_seconds / images_per_step


class EnergyMeter:
    """Reads the energy of one device while it is entered, of a GPU by CUDA's index. Opens no
    CUDA context."""

    def __init__(self, kind: str, index: int = 0, system: System | None = None) -> None:
        self._system, self._index = system or RealSystem(), index
        self.reason: str | None = (
            None if kind == "cuda" else f"nothing counts what a {kind} device takes"
        )
        """Why nothing is told, or nothing any more; None while it is."""
        self._sampled: EnergyReading | None = None
        self._left = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> Self:
        if (
            self.reason is None
            and self._ask("energy_joules") is None
            and self._ask("power_watts") is not None
        ):
            self.reason = None
            self._sampled = EnergyReading(time.monotonic(), 0.0)
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._sampler:
            self._sampler.join()

    def read(self) -> EnergyReading | None:
        """What the device has taken by now; None if that is not known, and `reason` says why."""
        if self.reason is None and len(self._process_ids()) > 1:
            self.reason = "several processes compute on the card, and NVML counts them together"
        if self.reason is not None:
            return None
        if self._sampler:
            return self._sampled
        joules = self._ask("energy_joules")
        return None if joules is None else EnergyReading(time.monotonic(), joules)

    def _ask(self, query: str) -> float | None:
        """What NVML says, or None, and `reason` says why."""
        try:
            value: Any = self._system.query("nvml", query, self._index)
        except Unavailable as error:
            self.reason = f"NVML: {error}"
            return None
        return float(value)

    def _process_ids(self) -> Collection[int]:
        """Ids of the processes that compute on the card; none if the driver does not list them."""
        try:
            value: Any = self._system.query("nvml", "compute_process_ids", self._index)
        except Unavailable:
            return ()
        return list(value)

    def _sample(self) -> None:
        """Sum power up by the trapezoidal rule until the meter is left."""
        before, then, joules = self._ask("power_watts"), time.monotonic(), 0.0
        while before is not None and not self._left.wait(SAMPLE_SECONDS):
            watts, now = self._ask("power_watts"), time.monotonic()
            joules += (before + (watts or before)) / 2 * (now - then)
            self._sampled = EnergyReading(now, joules)
            before, then = watts, now


def why_no_energy(device: Device, system: System | None = None) -> str | None:
    """Why no trial here could tell what its steps take; None if they can, as far as is known
    before.

    Others may compute on the card now: a search waits until they are done, or a trial says that
    they were not.
    """
    with EnergyMeter(device.kind, device.index, system) as meter:
        return meter.reason
