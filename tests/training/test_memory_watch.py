"""What a run watches of memory: leaks, the budget, phases, and what running out of it is called."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError, InvalidInput
from autotune.runtime import memory
from autotune.runtime.memory import library_bytes, resident_bytes
from autotune.runtime.resources import reraise_oom
from autotune.training.monitor import (
    NUM_WINDOWS,
    WINDOW_STEPS,
    MemoryWatch,
    PhaseWatch,
    leak_bytes_per_step,
)
from tests.training.conftest import CPU, Bench


def test_a_leak_is_noticed_once_and_the_budget_once() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=10**8)
    told = [
        watch.check(10**8 + step * 10**5, 10**8) for step in range(WINDOW_STEPS * (NUM_WINDOWS + 3))
    ]
    assert [message for message in told if message] == ["memory grows by 0.10 MiB per step"]
    told = [watch.check(10**8, 9 * 10**8) for _ in range(3)]
    assert [message is not None for message in told] == [True, False, False]
    assert "90% of what a run may take" in str(told[0])


def test_a_leak_is_noticed_in_a_run_that_is_near_its_budget() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=10**8)
    told = [
        watch.check(8 * 10**8 + step * 2 * 10**5, 9 * 10**8)
        for step in range(WINDOW_STEPS * (NUM_WINDOWS + 3))
    ]
    assert [message.split()[1] for message in told if message] == ["is", "grows"]
    assert len(watch.growth.window) < WINDOW_STEPS


def test_a_run_that_was_planned_to_fill_the_budget_is_no_alarm_until_it_takes_more() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=9 * 10**8)
    assert watch.check(10**8, 9 * 10**8) is None
    assert "96% of what a run may take" in str(watch.check(10**8, int(9.6 * 10**8)))


@given(
    st.integers(10**6, 10**9),
    st.lists(st.integers(-5000, 5000), min_size=NUM_WINDOWS, max_size=NUM_WINDOWS),
)
def test_noise_is_no_leak(level: int, noise: list[int]) -> None:
    assert (
        leak_bytes_per_step([level + one for one in noise]) == 0.0
        or max(noise) - min(noise) > level * 0.05
    )


def test_memory_that_a_preview_raises_once_is_no_leak() -> None:
    floors = [
        950 + window + (30 if window >= NUM_WINDOWS - 1 else 0) for window in range(NUM_WINDOWS)
    ]
    assert leak_bytes_per_step(floors) == 0.0
    assert (
        leak_bytes_per_step([950 + 10 * window for window in range(NUM_WINDOWS)])
        == 10 / WINDOW_STEPS
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a phase's peak"
)
def test_a_phase_inside_another_counts_its_memory_apart() -> None:
    watch = PhaseWatch(CPU)
    with watch.phase("outer"), watch.phase("inner"):
        block = b"x" * (300 * 2**20)
        del block
    outer, inner = watch.peaks["outer"].host_bytes, watch.peaks["inner"].host_bytes
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
