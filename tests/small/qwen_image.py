"""A small Qwen-Image pipeline, and its editing variants."""

from collections.abc import Sequence
from typing import Any

import diffusers
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)

from autotune.models.family import Family
from autotune.models.latents import build_empty_pipeline
from tests.small.parts import invert_input_layer, qwen_processor, qwen_text_encoder, qwen_tokenizer


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline; the editing classes get a processor for control images, too."""
    tokenizer = qwen_tokenizer(
        captions, build_empty_pipeline(family.pipeline_class).prompt_template_encode
    )
    text_encoder = qwen_text_encoder(tokenizer, hidden_size=128)
    transformer = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        axes_dims_rope=(8, 12, 12),
    )
    invert_input_layer(transformer.proj_out, transformer.img_in.weight)
    vae = AutoencoderKLQwenImage(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    parts = {
        "scheduler": make_scheduler(),
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
    }
    if "Edit" in family.pipeline_class:
        parts["processor"] = qwen_processor(tokenizer)
    return getattr(diffusers, family.pipeline_class)(transformer=transformer, **parts)


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The published scheduler."""
    return FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
