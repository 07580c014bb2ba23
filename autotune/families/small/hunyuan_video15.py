"""A small HunyuanVideo 1.5 pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import ByT5Tokenizer

from autotune.families.base import Family
from autotune.families.hunyuan_video15 import prompt_rules
from autotune.families.small.parts import (
    invert_input_layer,
    qwen_text_encoder,
    qwen_tokenizer,
    t5_encoder,
)

CHANNELS = 32


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline: 4 blocks. The tokenizer makes as many tokens of the system message as
    the published one.
    """
    tokenizer = qwen_tokenizer(
        captions, f"system\n{prompt_rules()['system_message']}\nuser\n\nassistant\n"
    )
    tokenizer_2 = ByT5Tokenizer()
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_layers=4,
        num_refiner_layers=1,
        attention_head_dim=32,
        num_attention_heads=3,
        text_embed_dim=128,
        text_embed_2_dim=64,
        image_embed_dim=32,
        rope_axes_dim=(8, 12, 12),
        task_type="t2v",
    )
    torch.nn.init.normal_(
        transformer.x_embedder.proj.weight, std=CHANNELS**-0.5
    )  # as large as a norm makes it
    # Only the first channels are the noisy latents'.
    invert_input_layer(
        transformer.proj_out, transformer.x_embedder.proj.weight[:, :CHANNELS].flatten(1)
    )
    vae = AutoencoderKLHunyuanVideo15(
        block_out_channels=(8, 8, 8, 16, 64), layers_per_block=1, scaling_factor=1.0
    ).eval()
    text_encoder = qwen_text_encoder(tokenizer, hidden_size=128, num_layers=3).model.language_model
    text_encoder_2 = t5_encoder(tokenizer_2, hidden_size=64)
    return HunyuanVideo15Pipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
