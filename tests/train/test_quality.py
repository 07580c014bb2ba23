"""The error of quantized layers is measured on the real weights, and too large a one stops the
run."""

import pytest
import torch
from torch import nn

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.quantized_layers import quantize_inside
from autotune.plan.candidate import QuantizationError
from autotune.report.run import error_text
from autotune.train import model as quality
from autotune.train.model import (
    MAX_BLOCK_ERROR,
    ErrorMeter,
    QualityMissed,
    load_model,
    load_transformer,
    require_quality,
)
from tests.builders import BITSANDBYTES
from tests.train.conftest import CPU, Bench
from tests.train.small import SETTINGS


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    made = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32, bias=False)) for _ in range(3)
    ]
    return [block.requires_grad_(False) for block in made]


def measured(made: list[nn.Module], choice: str) -> QuantizationError:
    meter, quantize = ErrorMeter(made), quantize_inside(made, choice)
    assert quantize is not None
    measured = meter.wrap(quantize)
    for block in made:
        for name, layer in block.named_modules():
            measured(name, layer)
    result = meter.result()
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("choice", "least", "most"),
    [
        ("torchao-int8", 0.003, 0.012),
        ("torchao-fp8", 0.02, 0.035),
        ("int8-matmul", 0.005, 0.015),
        ("fp8-matmul", 0.03, 0.045),
        pytest.param("bnb-nf4", 0.07, 0.11, marks=BITSANDBYTES),
    ],
)
def test_ordinary_weights_stay_within_what_their_storage_can_do(
    choice: str, least: float, most: float
) -> None:
    error = measured(blocks(), choice)
    assert (
        least
        < error.overall
        <= error.worst
        < most
        < MAX_BLOCK_ERROR[WEIGHT_FORMATS[choice].quality]
    )


def test_a_block_beyond_the_floor_is_refused_by_name() -> None:
    bad = QuantizationError(overall=0.04, worst=0.2, worst_block=1)
    with pytest.raises(QualityMissed, match="block 1") as caught:
        require_quality(bad, "high", "torchao-int8")
    assert "--exclude quantization=torchao-int8" in caught.value.hint
    require_quality(QuantizationError(overall=0.1, worst=0.1, worst_block=0), "compact", "bnb-nf4")
    require_quality(None, "exact", "none")


def test_the_meter_agrees_with_a_plain_comparison() -> None:
    made = blocks()[:1]
    layer = made[0][2]
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(64))
    before = layer(inputs)
    meter, quantize = ErrorMeter([layer]), quantize_inside([layer], "torchao-int8")
    assert quantize is not None
    meter.wrap(quantize)("layer", layer)
    result = meter.result()
    assert result is not None
    assert result.overall == pytest.approx(
        float((layer(inputs) - before).norm() / before.norm()), rel=1e-3
    )


@pytest.mark.parametrize("storage", ["torchao-int8", "torchao-fp8"])
def test_loading_real_weights_reports_it_and_plain_weights_have_none(
    bench: Bench, storage: str
) -> None:
    plan = bench.plan()
    settings = SETTINGS.model_copy(update={"quantization": storage})
    loaded = load_model(bench.resolved, plan.frozen.workload, settings, CPU, 0)
    assert loaded.quantization_error is not None
    assert 0.001 < loaded.quantization_error.worst < MAX_BLOCK_ERROR["high"]
    assert bench.trained.quantization_error is None
    line = error_text(loaded.quantization_error, storage)
    assert "off their real outputs" in line


def test_layers_of_swapped_blocks_are_measured_before_they_leave_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    home: set[int] = set()
    measure, move = quality._outputs, nn.Linear.to
    devices: list[str] = []

    def moved(layer: nn.Linear, *to: object, **how: object) -> nn.Linear:
        home.add(id(layer))
        return move(layer, *to, **how)

    def outputs(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        devices.append("host" if id(layer) in home else "device")
        return measure(layer, inputs)

    monkeypatch.setattr(nn.Linear, "to", moved)
    monkeypatch.setattr(quality, "_outputs", outputs)
    swapping = {"quantization": "torchao-int8", "checkpointed_blocks": 1, "swapped_blocks": 1}
    settings = SETTINGS.model_copy(update=swapping)
    load_transformer(bench.resolved, settings, CPU)
    assert home
    assert set(devices) == {"device"}
