"""The loss of every family: mix in noise, let the model predict, compare. Shared by training,
trials and tracing."""

from torch import Tensor, nn

from autotune.models.base import Batch, Family
from autotune.models.noise import NoiseProcess
from autotune.plan.job import Weighting


def denoising_loss(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess | None = None,
    weighting: Weighting = "none",
) -> Tensor:
    """Mean squared error of the prediction, averaged in fp32 over a micro-batch.

    Args:
        family: predicts by the model.
        transformer: the model that it calls.
        batch: collated samples; `latents` (batch, channels, frames, height, width) and the
            conditioning. If any has a mask or a weight also `loss_weights` (batch, 1, 1, height,
            width), factors of the squared error.
        noise: standard normal, in the shape of the latents.
        levels: (batch,) of noise, as `process` counts them.
        process: the model's, by default the family's.
        weighting: how images weigh by their noise; one of the process's.
    """
    process, clean = process or family.noise, batch["latents"]
    if weighting != "none" or "loss_weights" in batch:
        return image_losses(family, transformer, batch, noise, levels, process, weighting).mean()
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    return nn.functional.mse_loss(predicted.float(), process.target(clean, noise, levels).float())


def image_losses(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess,
    weighting: Weighting,
) -> Tensor:
    """The loss of each image of the micro-batch, (batch,): their mean is `denoising_loss`, up to
    rounding."""
    clean = batch["latents"]
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    errors = (predicted.float() - process.target(clean, noise, levels).float()).square()
    if "loss_weights" in batch:
        errors = errors * batch["loss_weights"].float()
    errors = errors.flatten(1).mean(dim=1)
    return errors if weighting == "none" else process.weights(levels, weighting) * errors
