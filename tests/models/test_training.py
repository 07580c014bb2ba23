"""A training step is what the pipelines' definition says, and training does what it is for."""

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from peft import get_peft_model_state_dict

from autotune.models.family import denoising_loss
from autotune.models.noise import DiscreteDiffusion
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.search.worker import TrialRequest, load_for_trial
from autotune.weights.adapters import AdapterInfo, save_adapter
from tests.builders import candidate
from tests.kinds import KINDS
from tests.models.small import CAPTIONS


def _loss(family, transformer, samples, noises, levels):
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
def test_loss_and_gradients_equal_independent_computation(small):
    transformer, parameters = small.adapted()
    samples = [small.sample(caption) for caption in CAPTIONS]
    generator = torch.Generator().manual_seed(5)
    noises = torch.randn(2, *samples[0]["latents"].shape, generator=generator)
    levels = small.levels(0.2, 0.85)
    ours = denoising_loss(small.family, transformer, small.family.collate(samples), noises, levels)
    ours.backward()
    gradients = [parameter.grad.clone() for parameter in parameters]
    transformer.zero_grad()
    expected = _loss(small.family, transformer, samples, noises, levels)
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    # Kandinsky5 rounds rotated queries and keys to bf16: last bits of a batch become 1/256.
    tolerance = 1e-2 if small.family.name.startswith("kandinsky5") else 1e-4
    for gradient, parameter in zip(gradients, parameters, strict=True):
        difference = float((gradient - parameter.grad).norm())
        assert difference <= tolerance * float(parameter.grad.norm()) + 1e-8


@pytest.mark.quick("flux3")
def test_trials_pass_whole_batches_at_once(small):
    # One by one, as FLUX.3 passes captions of unlike lengths, takes less memory than a run may.
    size = min(2, small.family.max_micro_batch_size or 2)
    work = small.workload().changed(effective_batch_size=size, buckets=(small.bucket,))
    settings = candidate(micro_batch_size=size)
    request = TrialRequest(resolve_model(ModelRef.of(small.folder)), work, settings, "cpu", 2)
    loaded, passes = load_for_trial(request), []
    loaded.model.transformer.register_forward_pre_hook(lambda *_: passes.append(1))
    batch = loaded.model.collate(loaded.largest)
    levels = small.levels(0.2, 0.85)[:size]
    denoising_loss(small.family, loaded.model.transformer, batch, batch["latents"], levels)
    assert passes == [1]


@pytest.mark.quick(*KINDS)
def test_stock_pipelines_load_adapters(small, tmp_path, caplog):
    info = AdapterInfo(model="x", plan_digest="x", rank=4, alpha=4.0, training_steps=1)
    for targets in ("attention", "all-linear"):
        transformer, parameters = small.adapted(targets)
        layers = get_peft_model_state_dict(transformer)
        folder = tmp_path / targets
        save_adapter(folder / "a.safetensors", layers, info, small.family.adapter_component)
        stock = small.stock()
        denoiser = getattr(stock, small.family.denoiser)
        try:
            stock.load_lora_weights(folder / "a.safetensors", adapter_name="learned")
            loaded = get_peft_model_state_dict(denoiser, adapter_name="learned")
            assert set(loaded) == set(layers)
            assert len(loaded) == len(parameters)
            assert all(torch.equal(loaded[key], layers[key]) for key in layers)
        finally:
            denoiser.unload_lora()


STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "epsilon": STABLE_DIFFUSION,
    "v_prediction": {**STABLE_DIFFUSION, "rescale_betas_zero_snr": True},
}
CLEAN, NOISE = torch.randn(2, 3, 4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
LEVELS = torch.tensor([0.0, 499.0, 999.0])


@pytest.mark.parametrize("prediction", SCHEDULERS)
def test_discrete_process_is_the_schedulers(prediction):
    scheduler = DDPMScheduler(**SCHEDULERS[prediction], prediction_type=prediction)
    process, steps = DiscreteDiffusion.from_scheduler(scheduler.config), LEVELS.long()
    noisy = scheduler.add_noise(CLEAN, NOISE, steps)
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(process.add_noise(CLEAN, NOISE, LEVELS), noisy, **close)
    velocity = scheduler.get_velocity(CLEAN, NOISE, steps)
    expected = NOISE if prediction == "epsilon" else velocity
    torch.testing.assert_close(process.target(CLEAN, NOISE, LEVELS), expected, **close)
    ratio = compute_snr(scheduler, steps[:2])
    limited = ratio.clamp(max=5.0) / (ratio if prediction == "epsilon" else ratio + 1)
    torch.testing.assert_close(process.weights(LEVELS[:2], "min_snr"), limited)
