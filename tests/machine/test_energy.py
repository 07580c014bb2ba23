"""Energy by NVML: its counter, else power summed up; and nothing from a card that several use or
that does not tell."""

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.machine import nvidia
from autotune.machine.energy import (
    SAMPLE_SECONDS,
    EnergyMeter,
    joules_per_image,
    mean_watts,
    why_no_energy,
)
from autotune.machine.nvidia import NvmlSource
from autotune.machine.system import Unavailable
from tests import builders
from tests.machine.test_nvidia import FakeNvml

DEVICE = builders.hardware().device


class Card(FakeNvml):
    """An NVML whose first card counts what it takes at `watts` all the time, with processes as
    they are set here."""

    def __init__(
        self, watts: float = 300.0, *, has_counter: bool = True, has_power: bool = True
    ) -> None:
        self.watts, self.has_counter, self.has_power = watts, has_counter, has_power
        self.joules, self.then = 5000.0, time.monotonic()
        self.computing, self.drawing = [os.getpid()], [7]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # type: ignore[no-untyped-def]
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        now = time.monotonic()
        self.joules, self.then = self.joules + self.watts * (now - self.then), now
        return round(1000 * self.joules)

    def nvmlDeviceGetPowerUsage(self, handle):  # type: ignore[no-untyped-def]
        if not self.has_power:
            raise self.NVMLError("Not Supported")
        return round(1000 * self.watts)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # type: ignore[no-untyped-def]
        return [SimpleNamespace(pid=pid) for pid in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # type: ignore[no-untyped-def]
        return [SimpleNamespace(pid=pid) for pid in self.drawing]


def system_of(card: Card, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose NVML is this card's."""
    monkeypatch.setattr(nvidia, "pynvml", card)
    queries = NvmlSource(str).queries

    def query(source: str, name: str, index: int = 0) -> object:
        try:
            return queries[name](index)
        except card.NVMLError as error:
            raise Unavailable(str(error)) from error

    return SimpleNamespace(query=query)


def test_the_counters_difference_over_the_time_between_is_the_mean_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card()
    with EnergyMeter("cuda", 0, system_of(card, monkeypatch)) as meter:
        before = meter.read()
        time.sleep(0.1)
        after = meter.read()
    assert mean_watts(before, after) == pytest.approx(300.0, rel=0.2)
    assert mean_watts(before, before) is None
    assert mean_watts(None, after) is None
    assert joules_per_image(300.0, 2.0, 4) == 150.0
    assert joules_per_image(None, 2.0, 4) is None


def test_without_a_counter_power_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(200.0, has_counter=False)
    with EnergyMeter("cuda", 0, system_of(card, monkeypatch)) as meter:
        time.sleep(3 * SAMPLE_SECONDS)
        before = meter.read()
        time.sleep(6 * SAMPLE_SECONDS)
        after = meter.read()
    assert mean_watts(before, after) == pytest.approx(200.0, rel=0.001)


def test_a_card_that_does_not_tell_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    system = system_of(Card(has_counter=False, has_power=False), monkeypatch)
    with EnergyMeter("cuda", 0, system) as meter:
        assert meter.read() is None
    assert why_no_energy(DEVICE, system) == "NVML: Not Supported"
    assert (
        why_no_energy(DEVICE.changed(kind="cpu"), system)
        == "nothing counts what a cpu device takes"
    )


def test_a_card_that_others_compute_on_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    system = system_of(card, monkeypatch)
    assert why_no_energy(DEVICE, system) is None, "this process may have opened it"
    card.computing = [4711]
    assert why_no_energy(DEVICE, system) is None, (
        "its own search may hold the card: the next one waits for it"
    )
    with EnergyMeter("cuda", 0, system) as meter:
        assert meter.read() is not None, "a container may give this process another number"
        card.computing = [4711, 4712]
        assert meter.read() is None
        assert "several processes" in (meter.reason or "")
