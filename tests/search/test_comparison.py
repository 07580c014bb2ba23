"""A job on several GPUs: what hours and cost count, in what order GPUs come, and which price
files are refused."""

from typing import Any

import pytest

from autotune.search.comparison import ComparedGpu


def gpu(
    name: str, step_seconds: float | None = 2.0, price: float | None = None, **changes: Any
) -> ComparedGpu:
    if step_seconds is None:
        return ComparedGpu(gpu=name, memory_gb=8, misfit="too small")
    known = {
        "num_steps": 1000,
        "time_uncertainty": 0.1,
        "image_seconds": step_seconds / 4,
        **changes,
    }
    return ComparedGpu(
        gpu=name, memory_gb=24, step_seconds=step_seconds, price_per_hour=price, **known
    )


def test_hours_and_cost_count_everything_from_an_empty_machine_on() -> None:
    one = gpu(
        "a", 3.0, price=2.0, download_seconds=100.0, search_seconds=200.0, other_seconds=300.0
    )
    assert one.total_seconds == 3600
    assert one.cost == 2.0
    assert one.hours_range == pytest.approx((3300 / 3600, 3900 / 3600))
    assert gpu("b").cost is None
    assert gpu("c", None).hours_range is None
