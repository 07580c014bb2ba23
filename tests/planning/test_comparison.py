"""A job on several GPUs: what hours and cost count, in what order GPUs come, and which price
files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.search.comparison import ComparedGpu, download_bytes
from tests.conftest import autotune_here
from tests.train.small import write_model_and_images


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


def test_a_published_model_is_downloaded_with_its_text_encoders() -> None:
    flux = next(model for model in autotune.list_models() if model.name == "flux1-dev")
    from autotune.models.registry import FAMILIES

    num_bytes = download_bytes(flux.num_parameters, FAMILIES["flux1-dev"].parts)
    assert 30e9 < num_bytes < 36e9  # 23.8 GB of the transformer, 9.5 of T5, .2 of CLIP


@pytest.mark.slow
def test_the_command_compares_prices_and_limits(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, _ = write_model_and_images(tmp_path)
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\ndate: 2026-11-22\nper_hour: {rtx 4090: 0.5, rtx 3060: 60}\n")
    asked = (
        "compare",
        "--model",
        model,
        "--resolution",
        "64",
        "--steps",
        "100",
        "--price-file",
        prices,
        "--hardware",
    )
    done = autotune_here(capfd, *asked, "4090,rtx-4080,3060")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line.split() for line in lines if line.startswith("nvidia-")]
    assert [row[0] for row in rows] == ["nvidia-rtx-4090", "nvidia-rtx-3060", "nvidia-rtx-4080"]
    assert rows[2][-1] == "-", "without a price it comes last"
    assert "cost EUR" in done.stdout
    assert "download" not in done.stdout, "the model is here"
    told = json.loads(
        autotune_here(capfd, *asked, "4090,rtx-4080,3060", "--under", "0.02", "--json").stdout
    )
    assert [one["gpu"] for one in told["gpus"]] == ["nvidia-rtx-4090"]
    assert told["gpus"][0]["cost"] < 0.02
    assert told["num_left_out"] == 2
    assert autotune_here(capfd, *asked, "4090", "--within", "soon").returncode == 2
