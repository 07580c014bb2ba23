"""A small FLUX.1 pipeline, and its variant for editing."""

from collections.abc import Sequence
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from autotune.models.family import Family
from tests.small.parts import (
    clip_text_encoder,
    clip_tokenizer,
    flux_vae,
    invert_input_layer,
    t5_encoder,
    t5_tokenizer,
)


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline: 2 double-stream and 2 single-stream blocks of width 128."""
    tokenizer, tokenizer_2 = clip_tokenizer(captions), t5_tokenizer(captions, max_length=512)
    text_encoder = clip_text_encoder(tokenizer, hidden_size=64)
    text_encoder_2 = t5_encoder(tokenizer_2, hidden_size=128)
    transformer = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    vae = flux_vae()
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return getattr(diffusers, family.pipeline_class)(
        scheduler=scheduler,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
