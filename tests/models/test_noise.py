"""Noise processes are those of diffusers' schedulers, and say where they are not defined."""

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.noise import FLOW_MATCHING, DiscreteDiffusion

STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "epsilon": {**STABLE_DIFFUSION, "prediction_type": "epsilon"},
    "v_prediction": {
        **STABLE_DIFFUSION,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
    },
}
CLEAN, NOISE = torch.randn(2, 3, 4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
LEVELS = torch.tensor([0.0, 499.0, 999.0])


@pytest.mark.parametrize("prediction", SCHEDULERS)
def test_discrete_process_is_the_schedulers(prediction):
    scheduler = DDPMScheduler(**SCHEDULERS[prediction])
    process = DiscreteDiffusion.from_scheduler(
        {**scheduler.config, "_class_name": "EulerDiscreteScheduler"}
    )
    torch.testing.assert_close(
        process.add_noise(CLEAN, NOISE, LEVELS),
        scheduler.add_noise(CLEAN, NOISE, LEVELS.long()),
        rtol=1e-4,
        atol=1e-6,
    )
    expected = (
        NOISE if prediction == "epsilon" else scheduler.get_velocity(CLEAN, NOISE, LEVELS.long())
    )
    torch.testing.assert_close(process.target(CLEAN, NOISE, LEVELS), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prediction", SCHEDULERS)
def test_min_snr_limits_the_weight_of_clean_images(prediction):
    from diffusers.training_utils import compute_snr

    process = DiscreteDiffusion.from_scheduler(SCHEDULERS[prediction])
    ratio = compute_snr(DDPMScheduler(**SCHEDULERS[prediction]), LEVELS[:2].long())
    divisor = ratio if prediction == "epsilon" else ratio + 1
    torch.testing.assert_close(
        process.weights(LEVELS[:2], "min_snr"), ratio.clamp(max=5.0) / divisor
    )


@given(st.floats(0, 1))
def test_levels_lie_in_the_schedule(share):
    level = DiscreteDiffusion().level(share)
    assert level == int(level)
    assert 0 <= level <= 999
    assert FLOW_MATCHING.level(share) == share
