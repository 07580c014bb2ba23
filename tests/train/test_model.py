"""The frozen weights: the error of quantizing them, and what each format trains and samples."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from autotune.data.pixels import read_facts
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.quantized_layers import quantize_inside
from autotune.plan.candidate import QuantizationError
from autotune.report.run import error_text
from autotune.train import model as model_module
from autotune.train.folder import ADAPTER_FILE
from autotune.train.model import ErrorMeter, QualityMissed, load_transformer, require_quality
from autotune.train.prepare import SampleRequest, read_sample_inputs
from autotune.train.run import train
from autotune.train.sample import sample_run
from tests.builders import BITSANDBYTES, OLD_TORCH, storages
from tests.data.pictures import write_pictures, write_video
from tests.small import write_small_pipeline
from tests.train.conftest import CPU, PROMPT, Killed, kill_at
from tests.train.small import SETTINGS, machine, make_plan


def blocks():
    torch.manual_seed(0)
    layers = ((nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32, bias=False)) for _ in range(3))
    return [nn.Sequential(*own).requires_grad_(False) for own in layers]


def measured(made, choice):
    meter, quantize = ErrorMeter(made), quantize_inside(made, choice)
    assert quantize is not None
    transform = meter.wrap(quantize)
    for block in made:
        for name, layer in block.named_modules():
            transform(name, layer)
    result = meter.result()
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("choice", "least", "most"),
    [
        ("torchao-int8", 0.003, 0.012),
        ("torchao-fp8", 0.02, 0.035),
        ("int8-rotated", 0.005, 0.015),
        pytest.param("fp8-matmul", 0.03, 0.045, marks=OLD_TORCH),
        pytest.param("bnb-nf4", 0.07, 0.11, marks=BITSANDBYTES),
    ],
)
def test_ordinary_weights_stay_within_limits(choice, least, most):
    error = measured(blocks(), choice)
    assert least < error.overall <= error.worst < most
    assert most < model_module.MAX_BLOCK_ERROR[WEIGHT_FORMATS[choice].quality]


def test_bad_blocks_are_refused():
    bad = QuantizationError(overall=0.04, worst=0.2, worst_block=1)
    with pytest.raises(QualityMissed, match="block 1") as caught:
        require_quality(bad, "high", "torchao-int8")
    assert "--exclude quantization=torchao-int8" in caught.value.hint
    require_quality(QuantizationError(overall=0.1, worst=0.1, worst_block=0), "compact", "bnb-nf4")
    require_quality(None, "exact", "none")


def test_meter_agrees_with_plain_comparison():
    layer = blocks()[0][2]
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(64))
    before = layer(inputs)
    error = measured([layer], "torchao-int8")
    expected = float((layer(inputs) - before).norm() / before.norm())
    assert error.overall == pytest.approx(expected, rel=1e-3)


def test_swapped_layers_are_measured_first(bench, monkeypatch):
    home = set()
    measure, move = model_module._outputs, nn.Linear._apply
    devices = []

    def moved(layer, *how, **named):
        home.add(id(layer))
        return move(layer, *how, **named)

    def outputs(layer, inputs):
        devices.append("host" if id(layer) in home else "device")
        return measure(layer, inputs)

    monkeypatch.setattr(nn.Linear, "_apply", moved)
    monkeypatch.setattr(model_module, "_outputs", outputs)
    swapping = {"quantization": "torchao-int8", "checkpointed_blocks": 1, "swapped_blocks": 1}
    load_transformer(bench.resolved, SETTINGS.changed(**swapping), CPU)
    assert home
    assert set(devices) == {"device"}


@pytest.mark.slow
@pytest.mark.parametrize("storage", storages())
def test_each_format_trains_and_goes_on(bench, tmp_path, storage):
    compact = bench.changed(quality="compact")
    settings = SETTINGS.changed(quantization=storage, checkpointed_blocks=1)
    job = {"settings": settings, "num_steps": 2, "checkpointing_steps": 1}
    watched, broken = tmp_path / "watched", tmp_path / "broken"
    previews = {"preview_prompts": (PROMPT,), "preview_every": 1}
    report = compact.train(compact.plan(output=str(watched), **job, **previews))
    assert report.verdict.num_unmoved == report.verdict.num_not_finite == 0
    assert report.quantization_error is not None
    line = error_text(report.quantization_error, storage)
    assert "off their real outputs" in line
    plan = compact.plan(output=str(broken), **job)
    with pytest.raises(Killed):
        compact.train(plan, kill_at(2))
    assert compact.train(plan, resume=True).resumed_at == 1
    one, other = (load_file(folder / ADAPTER_FILE) for folder in (watched, broken))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert Image.open(compact.sample(broken)).size == (32, 32)


@pytest.mark.slow
def test_videos_train_and_write_clips(tmp_path):
    data, run, hardware, prompt = tmp_path / "data", tmp_path / "run", machine(), "a red fox"
    write_pictures(data, (32, 32))
    write_video(data / "fox.mp4", 20, size=(32, 32))
    Image.new("L", (32, 32), 128).save(data / "fox.mask.png")
    write_small_pipeline("wan-2.1", tmp_path / "model", [prompt])
    plan = make_plan(
        tmp_path / "model",
        data,
        hardware,
        num_frames=5,
        num_steps=2,
        caption=prompt,
        flip=True,
        shuffle_tags=2,
        loss_mask="files",
        cache="memory",
        output=str(run),
        preview_every=0,
        preview_prompts=(prompt,),
    )
    assert sorted(bucket.num_frames for bucket in plan.frozen.workload.buckets) == [1, 5]
    assert train(plan, hardware, tmp_path / "cache").num_steps == 2
    assert not list((tmp_path / "cache").glob("*"))
    inputs = read_sample_inputs(run, SampleRequest(prompt, num_steps=2))
    written = sample_run(inputs, hardware, tmp_path)
    assert [path.name for path in written] == ["sample-0.mp4"]
    for clip in (*(run / f"sample_{name}_adapter.mp4" for name in ("with", "without")), *written):
        facts = read_facts(clip)
        assert (facts.width_px, facts.height_px, round(facts.duration_seconds * 16)) == (32, 32, 5)
        assert clip.with_suffix(".png").exists() == (clip not in written)
