"""A training step is what the pipelines' definition says, and training does what it is for."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from PIL import Image

from autotune.models.family import denoising_loss
from autotune.models.noise import FLOW_MATCHING
from autotune.plan.workload import Bucket
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import Noising, optimizer_step
from autotune.weights.adapters import AdapterInfo, save_adapter
from tests.kinds import KINDS
from tests.models.small import CAPTIONS, NO_GUIDANCE, Small


def _loss(family, transformer, samples, noises, levels):
    """Mean of the squared error of the prediction, one sample at a time, by the formulas of flow
    matching and of DDPM."""
    errors = []
    for sample, noise, level in zip(samples, noises, levels, strict=True):
        clean = sample["latents"]
        noisy, target = clean + level * (noise - clean), noise - clean
        if family.name == "sdxl":
            betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
            left = float((1 - betas)[: int(level) + 1].prod())
            noisy, target = left**0.5 * clean + (1 - left) ** 0.5 * noise, noise
        predicted = family.predict(transformer, noisy[None], level[None], family.collate([sample]))
        errors.append(((predicted[0] - target) ** 2).mean())
    return sum(errors) / len(errors)


@pytest.mark.quick(*KINDS)
def test_loss_and_gradients_equal_an_independent_computation(small):
    transformer, parameters = small.adapted()
    samples = [small.sample(caption) for caption in CAPTIONS]
    noises = torch.randn(
        2, *samples[0]["latents"].shape, generator=torch.Generator().manual_seed(5)
    )
    levels = small.levels(0.2, 0.85)
    ours = denoising_loss(small.family, transformer, small.family.collate(samples), noises, levels)
    ours.backward()
    gradients = [parameter.grad.clone() for parameter in parameters]
    transformer.zero_grad()
    expected = _loss(small.family, transformer, samples, noises, levels)
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    # Kandinsky5 rounds rotated queries and keys to bf16 even in fp32, so last bits of a batch
    # become 1/256.
    tolerance = 1e-2 if small.family.name.startswith("kandinsky5") else 1e-4
    for gradient, parameter in zip(gradients, parameters, strict=True):
        assert (
            float((gradient - parameter.grad).norm())
            <= tolerance * float(parameter.grad.norm()) + 1e-8
        )


@pytest.mark.quick(*KINDS)
def test_adapter_loads_in_the_stock_pipeline_without_unmapped_keys(small, tmp_path, caplog):
    info = AdapterInfo(model="x", plan_digest="x", rank=4, alpha=4.0, training_steps=1)
    for targets in ("attention", "all-linear"):
        transformer, parameters = small.adapted(targets)
        layers = get_peft_model_state_dict(transformer)
        folder = tmp_path / targets
        save_adapter(folder / "a.safetensors", layers, info, small.family.adapter_component)
        stock = type(small.pipeline)(**small.pipeline.components)
        try:
            stock.load_lora_weights(folder / "a.safetensors", adapter_name="learned")
            loaded = get_peft_model_state_dict(
                getattr(stock, small.family.denoiser), adapter_name="learned"
            )
            assert set(loaded) == set(layers)
            assert len(loaded) == len(parameters)
            assert all(torch.equal(loaded[key], layers[key]) for key in layers)
        finally:
            getattr(stock, small.family.denoiser).unload_lora()


OVERFIT_STEPS = {
    **{"sdxl": 60, "kandinsky5-image-lite": 60, "chroma": 40},
    **{"flux2-klein": 40, "flux2-dev": 40, "flux1-dev": 90, "flux1-kontext": 90},
}
USUAL_STEPS = 20


@pytest.fixture
def short_prompts(small, monkeypatch):
    """FLUX pads prompts to 512 tokens, which is most of its time here; 16 say as much."""
    if small.family.name.startswith("flux"):
        stock = small.pipeline.encode_prompt
        monkeypatch.setattr(
            small.pipeline,
            "encode_prompt",
            lambda **options: stock(**{**options, "max_sequence_length": 16}),
        )


@pytest.fixture
def learnable_image(small, monkeypatch):
    """A UNet's attention knows no positions: one so small learns a color within a few steps, but
    no shape."""
    if small.family.name == "sdxl":
        pixels = Small.pixels
        monkeypatch.setattr(
            Small,
            "pixels",
            lambda *args, **options: (
                (p := pixels(*args, **options)).mean((2, 3), True).expand_as(p)
            ),
        )


def _final_latents(small, bucket, transformer, monkeypatch):
    """What the pipeline's own loop ends in, as it hands it to the VAE."""
    caught = []
    decode = type(small.pipeline.vae).decode
    image = np.uint8(
        (np.asarray(small.controls(bucket, 1)[0][:, 0]).transpose(1, 2, 0) + 1) * 127.5
    )
    controls = [Image.fromarray(image)] * small.family.max_controls
    with monkeypatch.context() as patch:
        patch.setattr(
            small.pipeline.vae,
            "decode",
            functools.partial(_catch, caught, decode, small.pipeline.vae),
        )
        for name in (small.family.denoiser, *small.family.other_denoisers):
            patch.setattr(small.pipeline, name, transformer)
        alone = dataclasses.replace(
            small.family.defaults, sampling_guidance=NO_GUIDANCE.get(small.family.name, 1.0)
        )  # one call of the transformer a step
        patch.setattr(small.family, "defaults", alone)
        small.family.sample(
            small.pipeline, CAPTIONS[0], bucket, num_steps=8, seed=0, controls=controls
        )
    return caught[0]


def _catch(caught, decode, vae, latents, *args, **kwargs):
    caught.append(latents)
    return decode(vae, latents, *args, **kwargs)


@pytest.mark.quick("qwen-image")
def test_overfitting_one_image_brings_samples_closer_to_it(
    small, short_prompts, learnable_image, monkeypatch
):
    """Distances are between latents: the small pipelines' VAEs are random, so their pixels say
    little."""
    frames = small.bucket.num_frames
    bucket = Bucket(width_px=64, height_px=64, num_frames=frames, num_items=1)
    sample = small.sample(bucket=bucket)
    base = small.transformer
    transformer, parameters = small.adapted("all-linear")
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    optimizer = AdapterOptimizer(
        parameters, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0
    )
    # One of two transformers would be undone by the other: here it learns of all noise, and samples
    # alone.
    process = FLOW_MATCHING if small.family.other_denoisers else small.family.noise
    batch, noising = small.family.collate([sample] * 4), Noising(0, 3.0, process=process)
    for step in range(OVERFIT_STEPS.get(small.family.name, USUAL_STEPS)):
        optimizer_step(
            small.family,
            transformer,
            optimizer,
            [batch],
            effective_batch_size=4,
            noising=noising,
            step=step,
        )
    with torch.no_grad():
        losses = [
            np.mean(
                [
                    float(noising.loss(small.family, model, batch, 1000 + step, 0))
                    for step in range(5)
                ]
            )
            for model in (base, transformer)
        ]
    assert losses[1] < 0.7 * losses[0]
    pixels = small.pixels(bucket)[None]
    target = _target(small, pixels)
    before, after = (
        float((_final_latents(small, bucket, model, monkeypatch) - target).abs().mean())
        for model in (base, transformer)
    )
    assert after < 0.9 * before, (before, after, losses)


@torch.no_grad()
def _target(small, pixels):
    vae = small.pipeline.vae
    flat = not small.family.can_train_clips and vae.config.get("z_dim") is None
    shown = small.shown(pixels)
    return vae.encode(shown[:, :, 0] if flat else shown).latent_dist.mode()
