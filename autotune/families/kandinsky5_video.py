"""Kandinsky 5.0 Video Lite, 5 seconds: 32 visual blocks, and HunyuanVideo's VAE that packs four frames into one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.families.base import WEIGHT_DECAY_SOURCE, Defaults, Parts
from autotune.families.kandinsky5 import Kandinsky5
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

FRAMES_PER_LATENT = 4


class Kandinsky5Video(Kandinsky5):
    """Text to video; single images train it as well. Of a clip the first 4k + 1 frames count: the VAE's rhythm."""

    name = "kandinsky5-video-lite"
    hub_id = "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers"
    pipeline_class = "Kandinsky5T2VPipeline"
    transformer_config: ClassVar[Mapping[str, Any]] = {
        "in_visual_dim": 16,
        "out_visual_dim": 16,
        "time_dim": 512,
        "model_dim": 1792,
        "ff_dim": 7168,
        "num_text_blocks": 2,
        "num_visual_blocks": 32,
        "axes_dims": (16, 24, 24),
        "visual_cond": True,
    }
    parts = Parts(text_encoder_parameters=(8_292_166_656, 123_060_480), vae_class="AutoencoderKLHunyuanVideo")
    takes_clips = True
    defaults = Defaults(
        rank=16,
        lora_alpha=16.0,
        learning_rate=6e-5,
        weight_decay=1e-3,
        effective_batch_size=1,
        resolution_px=512,
        text_tokens=256,
        timestep_shift=5.0,
        preview_steps=25,
        num_frames=121,  # five seconds at 24 frames per second, and the first frame
        sources={
            "rank": "musubi-tuner's guide",
            "learning_rate": "musubi-tuner's guide (its example is the Pro model)",
            "timestep_shift": "musubi-tuner's guide",
            "weight_decay": WEIGHT_DECAY_SOURCE,
        },
    )

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        vae = pipeline.vae
        whole = (self._num_latent_frames(pixels.shape[1]) - 1) * FRAMES_PER_LATENT + 1
        latents: Tensor = vae.encode(pixels[None, :, :whole].to(vae.dtype)).latent_dist.mode()[0]
        return latents.to(pixels.dtype) * float(vae.config.scaling_factor)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, guidance: float | None, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        frames = (self._num_latent_frames(bucket.num_frames) - 1) * FRAMES_PER_LATENT + 1
        return {"prompt": prompt, "guidance_scale": 5.0 if guidance is None else guidance, "num_frames": frames}

    def write_small_pipeline(self, folder: Path, captions: Sequence[str], seed: int) -> None:
        from autotune.families.small.kandinsky5 import write_video_pipeline

        write_video_pipeline(folder, captions, seed)

    def _num_latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // FRAMES_PER_LATENT + 1

    def _rope_scale(self, height_px: int, width_px: int) -> tuple[float, float, float]:
        # As `Kandinsky5T2VPipeline._get_scale_factor`.
        near_480p = all(480 <= side <= 854 for side in (height_px, width_px))
        return (1, 2, 2) if near_480p else (1, 3.16, 3.16)
