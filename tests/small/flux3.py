"""A small FLUX.3 pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from autotune.models.latents import image_processor
from tests.small.flux2 import small_vae
from tests.small.parts import (
    QWEN_CHAT,
    invert_input_layer,
    qwen3_vl,
    qwen_image_processor,
    qwen_tokenizer,
)

TEXT_WIDTH, TEXT_LAYERS, NUM_TAKEN = 32, 32, 8  # of the text encoder, whose 4th to 32nd are taken


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    """2 blocks of the text and of the image and 2 of both, of width 128."""
    words = qwen_tokenizer(captions, QWEN_CHAT)
    kind = transformers.Qwen3VLForConditionalGeneration
    transformer = diffusers.Flux3Transformer2DModel(
        in_channels=64, cond_in_channels=64, num_layers=2, num_single_layers=2,
        attention_head_dim=32, num_attention_heads=4, axes_dims_rope=(8, 8, 8, 8),
        joint_attention_dim=NUM_TAKEN * TEXT_WIDTH,
    )  # fmt: skip
    invert_input_layer(transformer.proj_out, transformer.x_embedders["image"].weight)
    return {
        "vae": small_vae(),
        "text_encoder": qwen3_vl(kind, words, TEXT_WIDTH, TEXT_LAYERS),
        "tokenizer": image_processor("Qwen3VLProcessor")(qwen_image_processor(), words, QWEN_CHAT),
        "transformer": transformer.eval(),
    }
