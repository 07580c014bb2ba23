"""A model with two transformers: a run trains one, on noise of its own, and samples with both."""

import json
import shutil

import pytest
import torch
from peft import get_peft_model_state_dict

from autotune.data.encode import Encoders
from autotune.errors import InvalidInput
from autotune.models.adapter import add_adapter
from autotune.models.noise import FlowMatching
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.job import ModelRef
from autotune.train.sample import Preview, PreviewSampler
from autotune.train.step import Noising
from autotune.weights.adapters import AdapterInfo, save_adapter
from tests.models.small import CAPTIONS
from tests.train.small import SETTINGS

NAME = "wan-2.2-14b"
SHAPE = (16, 1, 8, 8)


@pytest.mark.parametrize("shift", [1.0, 12.0])
@pytest.mark.parametrize("sampling", ["logit_normal", "uniform"])
def test_experts_draw_their_levels(shift, sampling):
    whole = Noising(seed=3, shift=shift, sampling=sampling)
    levels = torch.tensor([whole.level_at(step, 0, SHAPE) for step in range(10_000)])
    for process in (FlowMatching(lowest_share=0.875), FlowMatching(highest_share=0.875)):
        part = Noising(seed=4, shift=shift, sampling=sampling, process=process)
        drawn = torch.tensor([part.level_at(step, 0, SHAPE) for step in range(2000)])
        inside = levels[(levels >= process.lowest_share) & (levels <= process.highest_share)]
        assert drawn.min() >= process.lowest_share - 1e-6
        assert drawn.max() <= process.highest_share + 1e-6
        quartiles = torch.tensor([0.25, 0.5, 0.75])
        difference = drawn.quantile(quartiles) - inside.quantile(quartiles)
        assert float(difference.abs().max()) < 0.03


def test_the_folder_tells_an_experts_boundary(small_pipelines, tmp_path):
    folder = shutil.copytree(small_pipelines(NAME).folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.75}))
    names = ("high-noise", "low-noise")
    high, low = (resolve_model(ModelRef(name=str(folder), expert=name)) for name in names)
    assert (high.noise, low.noise) == (FlowMatching(0.75, 1.0), FlowMatching(0.0, 0.75))
    assert high.transformer_file.name == "transformer"
    assert low.transformer_file.name == "transformer_2"
    assert high.spec == low.spec  # what one was planned for, the other is
    assert resolve_model(ModelRef.of(folder)).family.expert == "high-noise"
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 2.0}))
    with pytest.raises(InvalidInput, match="boundary_ratio"):
        _ = resolve_model(ModelRef.of(folder)).noise


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["high-noise", "low-noise"])
def test_previews_use_both_transformers(small_pipelines, tmp_path, expert):
    small = small_pipelines(NAME)
    model = resolve_model(ModelRef(name=str(small.folder), expert=expert))
    family = model.family
    transformer = type(small.transformer).from_pretrained(model.transformer_file)
    parameters = add_adapter(family, transformer, small.workload(), torch.float32, seed=1)
    for parameter in parameters:
        parameter.data.fill_(0.05)
    info = AdapterInfo(model="x", plan_digest="x", rank=4, alpha=4.0, training_steps=1)
    file = tmp_path / "adapter.safetensors"
    save_adapter(file, get_peft_model_state_dict(transformer), info, family.adapter_component)

    encoders = Encoders(model, CachingSettings(), torch.device("cpu"), SETTINGS.precision)
    sampler, preview = PreviewSampler(encoders), Preview(CAPTIONS[0], small.bucket, 4, seed=0)
    sampler._encode([preview])
    sampler.attach(type(small.transformer).from_pretrained(model.transformer_file))
    stock = family.load_pipeline(small.folder)

    def sampled():
        expected = family.sample(stock, preview.prompt, preview.bucket, num_steps=4, seed=0)
        frames = [frame.tobytes() for frame in sampler.sample(preview)]
        assert frames == [frame.tobytes() for frame in expected]
        return frames

    without = sampled()
    sampler.load_adapter(file)
    stock.load_lora_weights(file, **family.adapter_options)
    assert hasattr(getattr(stock, family.denoiser), "peft_config")
    assert not hasattr(getattr(stock, family.other_denoisers[0]), "peft_config")
    assert sampled() != without
