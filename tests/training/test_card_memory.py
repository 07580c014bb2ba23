"""What a run notices of a card's memory that no error tells, by readings such as a card would
give.
"""

import math
from pathlib import Path

import pytest

from autotune.training import card_memory
from autotune.training.card_memory import SPILL_STEPS, CardMemoryWatch, CardReading
from autotune.training.monitor import NUM_WINDOWS, WINDOW_STEPS
from tests import builders
from tests.training.conftest import CPU, Bench
from tests.training.test_fit import planned

FULL, ROOMY = CardReading(0.97, 20 * builders.GIB, 0), CardReading(0.7, 16 * builders.GIB, 0)


def told(
    readings: list[CardReading], seconds: float = 1.0, *, can_spill: bool = False
) -> list[str]:
    """What is said of steps that were planned to take a second."""
    source = iter([ROOMY, *readings])
    watch = CardMemoryWatch(lambda: next(source), 1.0, can_spill=can_spill)
    watch.start()
    return [warning for _ in readings if (warning := watch.check(seconds))]


def test_steps_several_times_slower_on_a_full_card_are_told_once_with_the_drivers_setting() -> None:
    (warning,) = told([FULL] * 3 * SPILL_STEPS, seconds=6.0, can_spill=True)
    assert warning.startswith(
        "steps take 6.0 times what was planned: with 97% of the card's memory taken"
    )
    assert "Prefer No Sysmem Fallback" in warning
    assert "--reserve" in warning


@pytest.mark.parametrize(
    ("reading", "seconds", "can_spill"),
    [(FULL, 2.5, True), (ROOMY, 60.0, True), (FULL, 60.0, False)],
    ids=["a slower card", "something else is slow", "a driver that fails instead"],
)
def test_slow_steps_alone_are_no_spill(
    reading: CardReading, seconds: float, can_spill: bool
) -> None:
    assert told([reading] * 3 * SPILL_STEPS, seconds, can_spill=can_spill) == []


def test_one_slow_step_is_no_spill() -> None:
    watch = CardMemoryWatch(lambda: FULL, 1.0, can_spill=True)
    assert [watch.check(90.0 if step == 4 else 1.0) for step in range(20)] == [None] * 20


def test_an_allocator_that_started_over_is_told_once_unless_the_run_has_fallen_back() -> None:
    retried = CardReading(0.97, 20 * builders.GIB, 2)
    (warning,) = told([ROOMY, ROOMY, retried, retried, CardReading(0.97, 20 * builders.GIB, 3)])
    assert "the allocator ran out of memory and started over" in warning
    readings = [ROOMY]
    watch = CardMemoryWatch(lambda: readings[-1])
    readings.append(retried)
    watch.restart()
    assert watch.check(1.0) is None


def test_after_a_fallback_slow_steps_are_no_spill() -> None:
    watch = CardMemoryWatch(lambda: FULL, 1.0, can_spill=True)
    watch.restart()
    assert [watch.check(6.0) for _ in range(3 * SPILL_STEPS)] == [None] * 3 * SPILL_STEPS


def test_reserved_memory_that_grows_is_told_and_what_grows_once_is_not() -> None:
    def reserved(step_bytes: int, until: int) -> list[CardReading]:
        steps = range(WINDOW_STEPS * (NUM_WINDOWS + 2))
        return [CardReading(0.8, builders.GIB + min(step, until) * step_bytes, 0) for step in steps]

    (warning,) = told(reserved(2**20, 10**6))
    assert warning.startswith("reserved memory grows by 1.00 MiB per step")
    assert told(reserved(2**20, 60)) == []


@pytest.mark.parametrize(
    ("memory_kind", "system", "can_spill"),
    [
        ("discrete", "linux", False),
        ("discrete", "wsl", True),
        ("discrete", "windows", True),
        ("integrated", "wsl", None),
    ],
)
def test_only_a_card_of_its_own_memory_is_read_and_only_some_drivers_spill(
    memory_kind: str, system: str, can_spill: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_memory, "card_reader", lambda device: lambda: FULL)
    here, frozen = builders.hardware(), planned().frozen
    here = here.changed(
        device=here.device.changed(memory_kind=memory_kind),
        host=here.host.changed(memory_model=system),
    )
    measured, predicted = (
        frozen.changed(expected=frozen.expected.changed(evidence=evidence))
        for evidence in ("measured", "predicted")
    )
    watch = CardMemoryWatch.of_device(CPU, here, measured)
    assert (watch.can_spill if watch.read() else None) is can_spill
    assert CardMemoryWatch.of_device(CPU, here, predicted).planned_seconds == math.inf


def test_a_run_warns_of_it_and_goes_on(bench: Bench, tmp_path: Path) -> None:
    readings = iter([ROOMY, *[CardReading(0.97, 20 * builders.GIB, 1)] * 9])
    loop = bench.loop(
        bench.plan(num_steps=4), tmp_path, card=CardMemoryWatch(lambda: next(readings))
    )
    (warning,) = loop.warnings
    assert "started over" in warning
    assert loop.done == 4
