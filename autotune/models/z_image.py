"""Z-Image: one stream of 30 blocks after two short refiners, Qwen3 as its text encoder, FLUX.1's
autoencoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.models.family import (
    AttentionLayout,
    Batch,
    Config,
    Defaults,
    Family,
    Parts,
    PublishedModel,
    Sample,
    Shapes,
    Sizes,
)
from autotune.models.latents import FLUX_VAE, VAE_FACTOR, ImageLatents, count_chat_tokens
from autotune.plan.workload import Bucket
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

MAX_TEXT_TOKENS = 512
"""Length to which the pipeline cuts prompts, its template included."""
BASE = PublishedModel(
    "Tongyi-MAI/Z-Image",
    {},
    Parts((4_022_468_096,), "AutoencoderKL", FLUX_VAE),
    "",
    6_154_908_736,
    "apache-2.0",
)
BLOCK = r"(noise_refiner|context_refiner|layers)\.\d+"
ATTENTION = r"attention\.(to_q|to_k|to_v|to_out\.0)"
MLP = r"feed_forward\.w[123]"


class ZImage(ImageLatents, Family):
    """Text to image. The transformer takes lists, so each prompt keeps its own length in a
    batch."""

    name = "z-image"
    models = (
        BASE,
        BASE.variant(
            "Tongyi-MAI/Z-Image-Turbo",
            "z-image-turbo",
            note="distilled to 8 steps without guidance, which training undoes: train on z-image, "
            "and use the adapter "
            "here; previews are sampled as z-image's",
        ),
    )
    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    components = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    tiny_config: ClassVar[Config] = {
        "dim": 256,  # two heads of the published size, 128
        "axes_dims": (32, 48, 48),
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "cap_feat_dim": 64,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=3.0,
        preview_steps=28,
        sampling_guidance=4.0,
    )
    size_multiple_px = VAE_FACTOR * 2
    separates_prompts = True
    text_multiple = 32
    max_text_tokens = MAX_TEXT_TOKENS
    masks_padding = True
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|adaLN_modulation\.0)",
    }
    block_lists = ("noise_refiner", "context_refiner", "layers")
    fp16_overflow = "in fp16 its activations overflow: Tongyi-MAI/Z-Image#14"
    excluded = MappingProxyType({"modulation": "its modulation layers hold 2% of the weights"})
    attention_layouts = (AttentionLayout("ZSingleStreamAttnProcessor", "complex", "freqs_cis"),)

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        size = (bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR)
        return {
            "latents": (config.get("in_channels", 16), 1, *size),
            "prompt_embeds": (text_tokens, config.get("cap_feat_dim", 2560)),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        prompts, _ = pipeline.encode_prompt(prompt=caption, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompts[0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        lengths = count_chat_tokens(folder, captions, enable_thinking=True)
        return [min(length, MAX_TEXT_TOKENS) for length in lengths]

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
        prompts = [batch[f"prompt_embeds_{number}"] for number in range(len(noisy))]
        # It counts time from noise to image, and so predicts the velocity's negative.
        velocity = transformer(list(noisy.unbind()), 1 - levels, prompts, return_dict=False)[0]
        return -torch.stack(velocity)
