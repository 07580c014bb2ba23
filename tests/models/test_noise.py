"""Noise processes are those of diffusers' schedulers, and say where they are not defined."""

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.noise import FLOW_MATCHING, DiscreteDiffusion

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


@pytest.mark.parametrize("prediction", SCHEDULERS)
def test_min_snr_limits_clean_images(prediction):
    scheduler = DDPMScheduler(**SCHEDULERS[prediction], prediction_type=prediction)
    process = DiscreteDiffusion.from_scheduler(scheduler.config)
    ratio = compute_snr(scheduler, LEVELS[:2].long())
    expected = ratio.clamp(max=5.0) / (ratio if prediction == "epsilon" else ratio + 1)
    torch.testing.assert_close(process.weights(LEVELS[:2], "min_snr"), expected)


@given(st.floats(0, 1))
def test_levels_lie_in_the_schedule(share):
    level = DiscreteDiffusion().level(share)
    assert level == int(level)
    assert 0 <= level <= 999
    assert FLOW_MATCHING.level(share) == share
