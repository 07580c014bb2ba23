"""What a run watches of memory: leaks, the budget, phases, and what running out of it is called."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError, InvalidInput, reraise_oom
from autotune.system import memory
from autotune.system.memory import library_bytes, resident_bytes
from autotune.train.metrics import read_metrics
from autotune.train.monitor import (
    NUM_WINDOWS,
    SPILL_STEPS,
    WINDOW_STEPS,
    Growth,
    MemoryReading,
    Monitor,
)
from tests import builders
from tests.builders import GIB
from tests.train.conftest import CPU, Bench
from tests.train.test_fit import planned

FULL = MemoryReading(0, 0, 20 * GIB, 0, 0.97)
ROOMY = MemoryReading(0, 0, 16 * GIB, 0, 0.7)


def told(readings: Iterable[MemoryReading], seconds: float = 1.0, **known: Any) -> list[str]:
    """What is said of steps that were planned to take a second."""
    monitor = Monitor(CPU, planned_seconds=1.0, **known)
    return [text for reading in readings for text in monitor.check(reading, seconds, 0.0)]


def test_a_leak_is_noticed_once_and_the_budget_once() -> None:
    steps = range(WINDOW_STEPS * (NUM_WINDOWS + 3))
    leak = [MemoryReading(8 * 10**8 + step * 2 * 10**5, 10**8) for step in steps]
    assert told(leak, budget_bytes=10**9) == ["memory grows by 0.19 MiB per step"]
    near = told([MemoryReading(1, 9 * 10**8)] * 3 + leak, budget_bytes=10**9)
    assert [text.split()[1] for text in near] == ["is", "grows"]
    assert "90% of what a run may take" in near[0]


def test_a_run_that_was_planned_to_fill_the_budget_is_no_alarm_until_it_takes_more() -> None:
    planned = {"budget_bytes": 10**9, "planned_bytes": 9 * 10**8}
    assert told([MemoryReading(1, 9 * 10**8)], **planned) == []
    assert "96% of what a run may take" in told([MemoryReading(1, int(9.6 * 10**8))], **planned)[0]


def test_steps_several_times_slower_on_a_full_card_are_told_once_with_the_drivers_setting() -> None:
    (warning,) = told([FULL] * 3 * SPILL_STEPS, seconds=6.0, can_spill=True)
    assert warning.startswith(
        "steps take 6.0 times what was planned: with 97% of the GPU's memory taken"
    )
    assert "Prefer No Sysmem Fallback" in warning


@pytest.mark.parametrize(
    ("reading", "seconds", "can_spill"),
    [(FULL, 2.5, True), (ROOMY, 60.0, True), (FULL, 60.0, False)],
    ids=["a slower card", "something else is slow", "a driver that fails instead"],
)
def test_slow_steps_alone_are_no_spill(
    reading: MemoryReading, seconds: float, can_spill: bool
) -> None:
    assert told([reading] * 3 * SPILL_STEPS, seconds, can_spill=can_spill) == []


def test_after_a_fallback_slow_steps_are_no_spill_and_earlier_retries_are_known() -> None:
    retried = replace(FULL, allocator_retries=2)
    monitor = Monitor(CPU, planned_seconds=1.0, can_spill=True, read=lambda: retried)
    monitor.restart()
    assert [monitor.check(retried, 6.0, 0.0) for _ in range(9)] == [[]] * 9


def test_an_allocator_that_started_over_is_told_once() -> None:
    retried = replace(FULL, allocator_retries=2)
    (warning,) = told([ROOMY, ROOMY, retried, retried, replace(FULL, allocator_retries=3)])
    assert "the allocator ran out of memory and started over" in warning


def test_reserved_memory_that_grows_is_told_and_what_grows_once_is_not() -> None:
    def reserved(until: int) -> list[MemoryReading]:
        steps = range(WINDOW_STEPS * (NUM_WINDOWS + 2))
        return [MemoryReading(0, 0, GIB + min(step, until) * 2**20, 0, 0.8) for step in steps]

    (warning,) = told(reserved(10**6))
    assert warning.startswith("reserved memory grows by 1.00 MiB per step")
    assert told(reserved(60)) == []


@pytest.mark.parametrize(
    ("memory_kind", "system", "can_spill"),
    [("discrete", "linux", False), ("discrete", "wsl", True), ("integrated", "wsl", False)],
)
def test_only_some_drivers_spill_and_only_a_measured_plan_is_a_reference(
    memory_kind: str, system: str, can_spill: bool
) -> None:
    here, frozen = builders.hardware(), planned().frozen
    here = here.changed(
        device=here.device.changed(memory_kind=memory_kind),
        host=here.host.changed(memory_model=system),
    )
    measured, predicted = (
        frozen.changed(expected=frozen.expected.changed(evidence=evidence))
        for evidence in ("measured", "predicted")
    )
    monitor = Monitor.of_run(CPU, here, measured)
    assert (monitor.can_spill, monitor.planned_seconds < math.inf) == (can_spill, True)
    assert Monitor.of_run(CPU, here, predicted).planned_seconds == math.inf


def test_a_run_warns_of_retries_records_them_and_goes_on(bench: Bench, tmp_path: Path) -> None:
    readings = iter([ROOMY, *[replace(FULL, allocator_retries=1)] * 9])
    loop = bench.loop(
        bench.plan(num_steps=4), tmp_path, monitor=Monitor(CPU, read=lambda: next(readings))
    )
    (warning,) = loop.warnings
    assert "started over" in warning
    row = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (row.step, row.reserved_bytes, row.allocator_retries) == (4, 20 * GIB, 1)


def growth(floors: Iterable[int]) -> float:
    """What is found after windows with these minima."""
    found = Growth()
    return [found.add(floor) for floor in floors for _ in range(WINDOW_STEPS)][-1]


@given(
    st.integers(10**6, 10**9),
    st.lists(st.integers(-5000, 5000), min_size=NUM_WINDOWS, max_size=NUM_WINDOWS),
)
def test_noise_is_no_leak(level: int, noise: list[int]) -> None:
    is_large = max(noise) - min(noise) > level * 0.05
    assert growth(level + one for one in noise) == 0.0 or is_large


def test_memory_that_a_preview_raises_once_is_no_leak() -> None:
    windows = range(NUM_WINDOWS)
    assert growth(950 + window + 30 * (window >= NUM_WINDOWS - 1) for window in windows) == 0.0
    assert growth(950 + 10 * window for window in windows) == 10 / WINDOW_STEPS


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a phase's peak"
)
def test_a_phase_inside_another_counts_its_memory_apart() -> None:
    monitor = Monitor(CPU)
    with monitor.phase("outer"), monitor.phase("inner"):
        block = b"x" * (300 * 2**20)
        del block
    outer, inner = monitor.peaks["outer"].host_bytes, monitor.peaks["inner"].host_bytes
    assert outer is not None
    assert inner is not None
    assert inner - outer > 200 * 2**20


def test_resident_memory_is_what_the_system_says() -> None:
    """Without shared libraries, which other processes have, too."""
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as block:  # fresh pages, whatever was freed before
        for _ in range(64):
            block.write(b"x" * 2**20)
        assert resident_bytes() - before == pytest.approx(len(block), rel=0.1)
        assert resident_bytes() == pytest.approx(
            psutil.Process().memory_info().rss - library_bytes(), rel=0.01
        )


@pytest.mark.parametrize(("look_seconds", "max_looks"), [(0.01, 101), (0.5, 5)])
def test_looks_at_libraries_take_little_of_a_run(
    monkeypatch: pytest.MonkeyPatch, look_seconds: float, max_looks: int
) -> None:
    """Linux goes through all pages of a process, which takes long if it is large."""
    now, looks = 0.0, 0

    def look() -> int:
        nonlocal now, looks
        now, looks = now + look_seconds, looks + 1
        return 0

    monkeypatch.setattr(memory, "_recent_library_bytes", {})
    monkeypatch.setattr(memory, "library_bytes", look)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now))
    while now < 100:
        resident_bytes()
        now += 0.05
    assert 1 < looks <= max_looks


@pytest.mark.slow
def test_memory_stays_flat(bench: Bench, tmp_path: Path) -> None:
    held: list[int] = []
    bench.loop(
        bench.plan(num_steps=120, checkpointing_steps=20),
        tmp_path,
        on_step=lambda event: held.append(event.memory_bytes),
    )
    assert max(held[-20:]) < 1.01 * max(held[40:60])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError("cannot allocate")]
)
def test_memory_that_runs_out_outside_of_steps_is_no_bug_of_ours(error: Exception) -> None:
    with pytest.raises(AutotuneError, match="memory ran out") as told, reraise_oom():
        raise error
    assert "--reserve" in told.value.hint


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), InvalidInput("out of memory?", hint="no")]
)
def test_other_errors_are_not_taken_for_short_memory(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, reraise_oom():
        raise error
    assert raised.value is error
