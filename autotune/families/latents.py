"""How the autoencoders that families share make latents of pixels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def encode_standardized(vae: Any, pixels: "Tensor") -> "Tensor":
    """Latents (channels, frames, height, width), each channel with the mean and the deviation
    that the VAE states.
    """
    mean = pixels.new_tensor(vae.config.latents_mean).view(-1, 1, 1, 1)
    std = pixels.new_tensor(vae.config.latents_std).view(-1, 1, 1, 1)
    latents: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0]
    return (latents.to(pixels.dtype) - mean) / std


class ImageLatents:
    """The latents of families whose autoencoder is one of images alone, and knows no frames."""

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        """Latents (channels, 1, height, width) of the first frame of `pixels`, shifted and
        scaled as the VAE says.
        """
        vae = pipeline.vae
        latents: Tensor = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()[
            0, :, None
        ]
        shift, scale = float(vae.config.shift_factor or 0.0), float(vae.config.scaling_factor)
        return (latents.to(pixels.dtype) - shift) * scale

    def decodable(self, latents: "Tensor") -> "Tensor":
        return latents[:, :, 0]
