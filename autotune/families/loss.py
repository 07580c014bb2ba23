"""The loss of every family: predict the velocity of a flow. Shared by training, trials and tracing."""

from torch import Tensor, nn

from autotune.families.base import Batch, Family


def flow_matching_loss(
    family: Family, transformer: nn.Module, batch: Batch, noise: Tensor, sigmas: Tensor, weighting: str = "none"
) -> Tensor:
    """Mean squared error of the predicted velocity, averaged in fp32 over a micro-batch.

    Args:
        family: predicts the velocity.
        transformer: the model that it calls.
        batch: collated samples; `latents` (batch, channels, frames, height, width) and the conditioning.
        noise: standard normal, in the shape of the latents.
        sigmas: (batch,) share of noise in [0, 1]: noisy = (1 - sigma) * clean + sigma * noise.
        weighting: how images weigh by their noise, under diffusers' names: `none`, `sigma_sqrt` or `cosmap`.
    """
    clean = batch["latents"]
    share = sigmas.view(-1, *[1] * (clean.ndim - 1)).to(clean.dtype)
    noisy = (1 - share) * clean + share * noise
    velocity = family.predict(transformer, noisy, sigmas, batch)
    if weighting == "none":
        return nn.functional.mse_loss(velocity.float(), (noise - clean).float())
    from diffusers.training_utils import compute_loss_weighting_for_sd3  # takes seconds

    errors = (velocity.float() - (noise - clean).float()).square().flatten(1).mean(dim=1)
    weighted: Tensor = (compute_loss_weighting_for_sd3(weighting, sigmas) * errors).mean()
    return weighted
