"""A small Qwen-Image 2.1 pipeline."""

from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel
from transformers import Qwen3VLForConditionalGeneration

from autotune.models.family import Family
from autotune.models.latents import image_processor
from tests.small.parts import (
    QWEN_VL_CHAT,
    invert_input_layer,
    qwen3_vl,
    qwen_image_processor,
    qwen_tokenizer,
)
from tests.small.qwen_image import make_scheduler

TEXT_WIDTH = 64


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline: 4 blocks of width 128."""
    tokenizer = qwen_tokenizer(
        captions, "system\nComprehend and analyze the provided prompt.user\nassistant\n"
    )
    text_encoder = qwen3_vl(Qwen3VLForConditionalGeneration, tokenizer, TEXT_WIDTH, num_layers=2)
    transformer = QwenImage21Transformer2DModel(
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        context_in_dim=TEXT_WIDTH,
        mlp_ratio=2,
        axes_dims_rope=(8, 12, 12),
    )
    invert_input_layer(transformer.proj_out, transformer.img_in.weight)
    vae = AutoencoderKLQwenImage21(
        base_dim=16, decoder_base_dim=16, dim_mult=[1, 1, 2, 2, 2], num_res_blocks=1
    ).eval()
    processor = image_processor("Qwen3VLProcessor")(
        qwen_image_processor(), tokenizer, chat_template=QWEN_VL_CHAT
    )
    return QwenImage21Pipeline(
        scheduler=make_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        processor=processor,
        transformer=transformer,
    )
