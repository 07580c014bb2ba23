"""A job on several GPUs: what hours and cost count, in what order GPUs come, and which price
files are refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.api.comparing import _gpus, _prices
from autotune.errors import InvalidInput
from autotune.planning.comparison import ComparedGpu, download_bytes, select_gpus
from autotune.reporting.machine import comparison_lines
from tests.conftest import autotune_here
from tests.training.small import write_model_and_images


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


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"),
            st.none() | st.floats(0.01, 100),
            st.none() | st.floats(0, 10),
        ),
        unique_by=lambda each: each[0],
    ),
    st.none() | st.floats(0, 50),
    st.none() | st.floats(0, 50),
    st.sampled_from([None, "cost", "hours", "name"]),
)
def test_what_is_selected_is_within_the_limits_and_in_order(
    rows: list[tuple[str, float | None, float | None]],
    max_cost: float | None,
    max_hours: float | None,
    order: Any,
) -> None:
    every = [gpu(*row) for row in rows]
    chosen = select_gpus(every, max_cost=max_cost, max_hours=max_hours, order=order)
    fitting = [one for one in chosen if one.misfit is None]
    assert [one for one in chosen if one.misfit] == sorted(
        (e for e in every if e.misfit), key=lambda e: e.gpu
    )
    for one in every:
        is_within = (max_cost is None or (one.cost is not None and one.cost <= max_cost)) and (
            max_hours is None or (one.total_seconds or 0) <= 3600 * max_hours
        )
        assert (one in chosen) == (one.misfit is not None or is_within)
    by_cost = order == "cost" or (order is None and any(one.cost is not None for one in every))
    keys: list[Any] = [one.gpu for one in fitting]
    if order != "name":
        keys = [
            (one.cost if one.cost is not None else 1e9) if by_cost else one.total_seconds
            for one in fitting
        ]
    assert keys == sorted(keys)


def test_a_published_model_is_downloaded_with_its_text_encoders() -> None:
    flux = next(model for model in autotune.list_models() if model.name == "flux1-dev")
    from autotune.families.registry import FAMILIES

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("per_hour: {4090: -1}", "per_hour.4090: input should be greater than or equal to 0"),
        ("per_hour: {4090: 1, rtx 4090: 2}", "a second price of nvidia-rtx-4090"),
        ("per_hour: {[4090]: 1}", "plain text"),
        ("per_hour: {rtx 4090: -1}", "greater than or equal to 0"),
        ("per_hour: {rtx 4090: cheap}", "per_hour.rtx 4090"),
        ("per_hour: {rtx 4090: .nan}", "finite"),
        ("per_hour: {rtx 4990: 1}", "no hardware called 'rtx 4990'"),
        ("[1]", "holds no list of prices"),
        ("a: &a [*a]", "anchors and aliases"),
        ("{", "is not YAML"),
        ("", "holds no list of prices"),
    ],
)
def test_prices_that_make_no_sense_are_refused_before_anything_is_predicted(
    tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(content)
    with pytest.raises(InvalidInput) as refused:
        autotune.compare("flux1-dev", hardware="4090", prices=file)
    assert words in refused.value.message
    assert str(file) in refused.value.message
    assert refused.value.hint


def test_a_price_may_be_named_by_a_number_and_a_missing_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    with pytest.raises(InvalidInput, match="No such file"):
        autotune.compare("flux1-dev", hardware="4090", prices=file)
    file.write_text("per_hour:\n  4090: 0.4\n  h100-sxm: 2\n")
    assert _prices(file).per_hour == {"4090": 0.4, "h100-sxm": 2.0}
    names = [gpu.id for gpu in _gpus("4090, h100-sxm")]
    assert names == ["nvidia-rtx-4090", "nvidia-h100-sxm"]
    assert len(_gpus(["4090", "all"])) > 40


@pytest.mark.parametrize(
    "wrong",
    [
        {"hardware": []},
        {"hardware": "4990"},
        {"download_rate": 0},
        {"record": "x"},
        {"nonsense": 1},
    ],
)
def test_what_is_no_comparison_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        autotune.compare("flux1-dev", **{"hardware": "4090", **wrong})


def test_where_nothing_fits_the_table_says_so() -> None:
    lines = comparison_lines(autotune.Comparison(model="m", gpus=(gpu("small", None),)))
    assert "none of these GPUs" in lines
    assert lines[-1] == "does not fit: small"
