"""Kandinsky 5.0 Image Lite: 50 visual blocks, and FLUX's VAE."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.families.base import FLUX_VAE, WEIGHT_DECAY_SOURCE, Defaults, Parts
from autotune.families.kandinsky5 import Kandinsky5
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


class Kandinsky5Image(Kandinsky5):
    """Text to image."""

    name = "kandinsky5-image-lite"
    hub_id = "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"
    pipeline_class = "Kandinsky5T2IPipeline"
    transformer_config: ClassVar[Mapping[str, Any]] = {
        "in_visual_dim": 16,
        "out_visual_dim": 16,
        "time_dim": 512,
        "model_dim": 2560,
        "ff_dim": 10240,
        "num_text_blocks": 2,
        "num_visual_blocks": 50,
        "axes_dims": (32, 48, 48),
    }
    parts = Parts(text_encoder_parameters=(8_292_166_656, 123_060_480), vae_class="AutoencoderKL", vae_config=FLUX_VAE)
    defaults = Defaults(
        rank=16,
        lora_alpha=16.0,
        learning_rate=1e-4,
        weight_decay=1e-3,
        effective_batch_size=4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=3.0,
        preview_steps=25,
        sources={
            "rank": "SimpleTuner's guide for this model",
            "learning_rate": "SimpleTuner's guide for this model",
            "timestep_shift": "SimpleTuner's guide for this model",
            "weight_decay": WEIGHT_DECAY_SOURCE,
        },
    )

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        vae = pipeline.vae
        latents: Tensor = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()[0, :, None]
        # The pipeline undoes the scale alone and knows no shift, unlike FLUX with the same VAE.
        return latents.to(pixels.dtype) * float(vae.config.scaling_factor)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, guidance: float | None, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        # The pipeline would replace any other size by one of its seven.
        pipeline.resolutions = [(bucket.width_px, bucket.height_px)]
        return {"prompt": prompt, "guidance_scale": 3.5 if guidance is None else guidance}

    def write_small_pipeline(self, folder: Path, captions: Sequence[str], seed: int) -> None:
        from autotune.families.small.kandinsky5 import write_image_pipeline

        write_image_pipeline(folder, captions, seed)

    def _num_latent_frames(self, num_frames: int) -> int:
        return 1

    def _rope_scale(self, height_px: int, width_px: int) -> tuple[float, float, float]:
        return (1.0, 1.0, 1.0)
