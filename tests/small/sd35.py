"""A small Stable Diffusion 3.5 pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from tests.small.parts import (
    clip_text_encoder,
    clip_tokenizer,
    image_vae,
    invert_input_layer,
    t5_encoder,
    t5_tokenizer,
)


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    tokenizer, tokenizer_3 = clip_tokenizer(captions), t5_tokenizer(captions, max_length=256)
    clip = clip_text_encoder(tokenizer, hidden_size=64).config
    transformer = diffusers.SD3Transformer2DModel(
        num_layers=4, num_attention_heads=2, joint_attention_dim=128, caption_projection_dim=128,
        pooled_projection_dim=128, pos_embed_max_size=192, dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )  # fmt: skip
    patches = transformer.pos_embed.proj.weight
    patches.data.mul_(4)  # or positions, which are added to them, would be half of what comes out
    # Channels are innermost there.
    invert_input_layer(transformer.proj_out, patches.permute(0, 2, 3, 1).flatten(1))
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), "vae": image_vae(family),
        "text_encoder": transformers.CLIPTextModelWithProjection(clip).eval(),
        "tokenizer": tokenizer,
        "text_encoder_2": transformers.CLIPTextModelWithProjection(clip).eval(),
        "tokenizer_2": tokenizer, "text_encoder_3": t5_encoder(tokenizer_3, hidden_size=128),
        "tokenizer_3": tokenizer_3, "transformer": transformer,
    }  # fmt: skip
