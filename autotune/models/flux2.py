"""FLUX.2 klein and dev."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from autotune.models import facts
from autotune.models.family import Batch, Family
from autotune.models.latents import ATTENTION, load_tokenizer, send
from autotune.system.lazy import Tensor, torch

TEXT_TOKENS = 512  # of every prompt: the model attends to the padding, too


BLOCK = r"transformer_blocks\.\d+"
SINGLE = r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
MLP = r"ff(_context)?\.linear_(in|out)"


class Flux2Klein(Family):
    """Text to image. A single-stream block's attention and MLP are one layer in and one out."""

    name = "flux2-klein"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux": "flux2-klein", "klein": "flux2-klein", "flux2-klein-base": "flux2-klein"}
    pipeline_class = "Flux2KleinPipeline"
    transformer_class = "Flux2Transformer2DModel"
    latent_px = 16  # the autoencoder's factor of 8, and 2x2 patches
    patch = 1
    latent_channels = ("in_channels", 128)
    prompt_size = (("joint_attention_dim", 15360),)
    max_text_tokens = TEXT_TOKENS
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}|{SINGLE}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})|{SINGLE}",
        # the modulation is outside of the blocks
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP})|{SINGLE}",
    }
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")
    excluded = {
        "modulation": (
            "its blocks share their modulation layers, which hold at most 4% of the weights"
        )
    }
    # Not of single-stream blocks: there one projection makes all.
    attention_layouts: ClassVar[tuple[facts.AttentionLayout, ...]] = (
        facts.AttentionLayout(
            "Flux2AttnProcessor", "cos_sin", "image_rotary_emb", text=facts.ADDED_TEXT
        ),
    )

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        latents: Tensor = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()
        patches = torch.nn.functional.pixel_unshuffle(latents, 2).to(pixels.dtype)
        # The autoencoder keeps mean and deviation of each channel in a batch norm.
        norm = vae.bn
        mean = norm.running_mean.view(1, -1, 1, 1)
        variance = norm.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
        normalized: Tensor = (patches - mean) / variance.sqrt()
        return normalized[0, :, None]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return torch.nn.functional.pixel_shuffle(latents[:, :, 0], 2)

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        prompt = batch["prompt_embeds"]
        rows, columns = noisy.shape[3], noisy.shape[4]
        # A position is (time, row, column, place in the text).
        grid = torch.meshgrid(*(torch.arange(n) for n in (1, rows, columns, 1)), indexing="ij")
        text = torch.zeros(prompt.shape[1], 4)
        text[:, 3] = torch.arange(prompt.shape[1])
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            encoder_hidden_states=prompt,
            timestep=levels,
            guidance=self.guidance_input(transformer, levels, batch),
            img_ids=send(torch.stack(grid, dim=-1).reshape(rows * columns, 4), noisy.device),
            txt_ids=send(text, noisy.device),
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)


class Flux2Dev(Flux2Klein):
    """Text to image."""

    name = "flux2-dev"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux": "flux2-dev"}
    pipeline_class = "Flux2Pipeline"

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        # The chat template is all that the pipeline wants of Pixtral's processor.
        return super().load_pipeline(folder, **{"tokenizer": load_tokenizer(folder), **components})
