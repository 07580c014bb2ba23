"""Krea 2: one stream of 28 blocks over text and image, twelve layers of Qwen3-VL as the text,
Qwen-Image's autoencoder.

Two stages of short blocks make one text of those twelve layers. They are not adapted, so they need
no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.models.family import (
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
from autotune.models.latents import (
    PATCH,
    VAE_FACTOR,
    build_empty_pipeline,
    encode_standardized,
    load_tokenizer,
    pack,
    unpack,
)
from autotune.plan.workload import Bucket
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = lazy_module("torch.nn")

MAX_TEXT_TOKENS = 512
"""Length to which the pipeline pads prompts, under a mask; what follows the prompt in its
template counts, too."""
PARTS = Parts((4_437_815_808,), "AutoencoderKLQwenImage")
RAW = PublishedModel(
    "krea/Krea-2-Raw", {}, PARTS, "", 12_820_073_036, "krea-2-community-license-agreement"
)
BLOCK = r"transformer_blocks\.\d+"
ATTENTION = r"attn\.(to_q|to_k|to_v|to_gate|to_out\.0)"
MLP = r"ff\.(gate|up|down)"


class Krea2(Family):
    """Text to image. Prompts are encoded at their own length: padding is masked and takes no
    position."""

    name = "krea-2"
    models = (
        RAW,
        RAW.variant(
            "krea/Krea-2-Turbo",
            "krea-2-turbo",
            note="distilled to 8 steps without guidance, which training undoes: train on krea-2, "
            "and use the adapter "
            "here, as its makers advise",
        ),
    )
    pipeline_class = "Krea2Pipeline"
    transformer_class = "Krea2Transformer2DModel"
    components = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    tiny_config: ClassVar[Config] = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "text_hidden_dim": 64,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 128,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=2.5,
        preview_steps=28,
        sampling_guidance=4.5,
        shift_by_tokens=((256, 0.5), (6400, 1.15)),
        sources={
            "timestep_shift": "the pipeline's at 1024 px",
            "preview_steps": "the pipeline's default",
            "sampling_guidance": "the pipeline's default",
        },
    )
    size_multiple_px = VAE_FACTOR * PATCH
    max_text_tokens = MAX_TEXT_TOKENS
    masks_padding = True
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP})",  # a block's modulation is a table
    }
    block_lists = ("transformer_blocks",)
    excluded = MappingProxyType(
        {
            "modulation": "a block's modulation is a table, of next to no weights",
            "norm_rope": (
                "several of its queries share a key, and a gate follows: the function "
                "supports "
                "neither"
            ),
        }
    )

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        size = (bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR)
        return {
            "latents": (config.get("in_channels", 64) // PATCH**2, 1, *size),
            "prompt_embeds": (
                text_tokens,
                config.get("num_text_layers", 12),
                config.get("text_hidden_dim", 2560),
            ),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        prompts, mask = pipeline.encode_prompt(caption, max_sequence_length=MAX_TEXT_TOKENS)
        return {"prompt_embeds": prompts[0][mask[0]]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        stock, tokenizer = build_empty_pipeline(self.pipeline_class), load_tokenizer(folder)
        suffix = stock.prompt_template_encode_num_suffix_tokens
        texts = [stock.prompt_template_encode_prefix + caption for caption in captions]
        lengths = (
            len(ids) - stock.prompt_template_encode_start_idx + suffix
            for ids in tokenizer(texts)["input_ids"]
        )
        return [min(length, MAX_TEXT_TOKENS) for length in lengths]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        return encode_standardized(pipeline.vae, pixels)

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
        from diffusers import Krea2Pipeline

        prompt, (rows, columns) = batch["prompt_embeds"], noisy.shape[3:]
        velocity: Tensor = transformer(
            hidden_states=pack(noisy),
            encoder_hidden_states=prompt,
            timestep=levels,
            position_ids=Krea2Pipeline.prepare_position_ids(
                prompt.shape[1], rows // PATCH, columns // PATCH, noisy.device
            ),
            encoder_attention_mask=batch.get("prompt_mask"),
            return_dict=False,
        )[0]
        return unpack(velocity, noisy.shape)
