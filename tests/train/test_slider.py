"""A slider: trained without pictures, the base's predictions for two prompts are its ends."""

import pytest
import torch

from autotune.api import list_choices
from autotune.data.cache import Cache
from autotune.data.dataset import slider_data
from autotune.data.encode import Encoders, encode_dataset
from autotune.errors import InvalidInput
from autotune.plan.candidate import CachingSettings
from autotune.train.model import apply_settings
from autotune.train.step import SLIDER_GUIDANCE, Noising
from tests.train.conftest import CPU, Bench
from tests.train.small import SETTINGS
from tests.train.test_preserve_prior import losses
from tests.train.test_resume import same

PROMPTS = ("a red circle", "a blue circle on white", "a circle")


@pytest.fixture(scope="module")
def sliding(bench, tmp_path_factory):
    own = bench.changed(is_slider=True)
    data, cache = slider_data(PROMPTS, 32, 32).training, Cache(tmp_path_factory.mktemp("slider"))
    encoders = Encoders(own.resolved, CachingSettings(), CPU, "fp32")
    buckets = own.plan().frozen.workload.buckets
    encoded = encode_dataset(encoders, data, buckets, cache, preserve_prior=3)
    return Bench(**{**vars(own), "encoded": encoded})


@torch.no_grad()
@pytest.mark.parametrize("strength", [1, -1])
def test_ends_are_what_base_predicts(sliding, strength):
    model, family, encoded = sliding.trained, sliding.resolved.family, sliding.encoded
    for parameter in model.adapter:
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    (index,) = (at for at, item in enumerate(encoded.items) if item.slides == strength)
    batch = model.collate([encoded.sample(index)] * 2)
    assert not batch["latents"].any()
    noising = Noising(seed=5, slider_ends=encoded.slider_ends)
    draws = [noising.draw(2, at, batch["latents"].shape[1:]) for at in (0, 1)]
    noise, levels = torch.stack([n for n, _ in draws]), torch.tensor([s for _, s in draws])
    noisy = levels.view(-1, 1, 1, 1, 1) * noise
    pipeline = Encoders(sliding.resolved, CachingSettings(), CPU, "fp32").load_pipeline()
    latents = {"latents": batch["latents"][0]}
    prompts = [
        model.collate([{**family.encode_caption(pipeline, text), **latents}] * 2)
        for text in PROMPTS
    ]
    model.transformer.disable_adapters()
    positive, negative, neutral = (
        family.predict(model.transformer, noisy, levels, each) for each in prompts
    )
    model.transformer.enable_adapters()
    model.transformer.set_adapters(["default"], [strength])
    ours = family.predict(model.transformer, noisy, levels, prompts[2])
    model.transformer.set_adapters(["default"], [1.0])
    target = neutral + strength * SLIDER_GUIDANCE * (positive - negative)
    loss = noising.loss(family, model.transformer, batch, 2, 0)
    assert loss.item() == pytest.approx((ours - target).square().mean().item(), rel=1e-4)


def test_settings_slide_alike(sliding, tmp_path):
    usual = losses(sliding, tmp_path / "usual")
    settings = SETTINGS.changed(micro_batch_size=1, checkpointed_blocks=2)
    apply_settings(sliding.trained, settings)
    found = losses(sliding, tmp_path / "others", settings=settings)
    assert found == pytest.approx(usual, rel=1e-5)
    apply_settings(sliding.trained, SETTINGS)


def test_killed_sliders_end_alike(sliding, tmp_path):
    plan = sliding.plan(num_steps=3, checkpointing_steps=1)
    whole = sliding.loop(plan, tmp_path / "whole")
    sliding.loop(plan, tmp_path / "killed", kill_after=2)
    assert same(sliding.loop(plan, tmp_path / "killed"), whole)


@pytest.mark.parametrize("model", ["wan-2.2-i2v", "qwen-image-edit"])
def test_models_that_need_pictures_are_refused(model):
    with pytest.raises(InvalidInput, match="starts from one"):
        list_choices(model, slider=PROMPTS, hardware="nvidia-h100-sxm")
