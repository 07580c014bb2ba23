"""Small FLUX.1 pipelines: for text to image, for editing, and Chroma's."""

from collections.abc import Sequence
from typing import Any

import diffusers

from autotune.models.family import Family
from tests.small.parts import (
    clip_text_encoder,
    clip_tokenizer,
    dynamic_scheduler,
    image_vae,
    invert_input_layer,
    t5_encoder,
    t5_tokenizer,
)

BLOCKS: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4,
    "joint_attention_dim": 128, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    parts = _build_chroma(captions) if family.name == "chroma" else _build_flux(captions)
    transformer = parts["transformer"]
    invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    return {**parts, "vae": image_vae(family)}


def _build_flux(captions: Sequence[str]) -> dict[str, Any]:
    tokenizer, tokenizer_2 = clip_tokenizer(captions), t5_tokenizer(captions, max_length=512)
    return {
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
        "text_encoder": clip_text_encoder(tokenizer, hidden_size=64),
        "text_encoder_2": t5_encoder(tokenizer_2, hidden_size=128),
        "transformer": diffusers.FluxTransformer2DModel(
            **BLOCKS, pooled_projection_dim=64, guidance_embeds=True
        ),
        "scheduler": dynamic_scheduler((256, 0.5), (4096, 1.15), shift=3.0),
    }


def _build_chroma(captions: Sequence[str]) -> dict[str, Any]:
    tokenizer = t5_tokenizer(captions, max_length=512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": t5_encoder(tokenizer, hidden_size=128),
        "transformer": diffusers.ChromaTransformer2DModel(
            **BLOCKS, approximator_hidden_dim=128, approximator_layers=2
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
