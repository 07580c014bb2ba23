"""A small Krea 2 pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from autotune.models.latents import build_empty_pipeline
from tests.small.parts import dynamic_scheduler, invert_input_layer, qwen3_vl, qwen_tokenizer

TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)  # of the text encoder: the outputs that are used


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    stock = build_empty_pipeline("Krea2Pipeline")
    template = stock.prompt_template_encode_prefix + stock.prompt_template_encode_suffix
    tokenizer = qwen_tokenizer(captions, template)
    text_encoder = qwen3_vl(transformers.Qwen3VLModel, tokenizer, TEXT_WIDTH, TEXT_LAYERS[-1])
    transformer = diffusers.Krea2Transformer2DModel(
        num_layers=4, attention_head_dim=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, timestep_embed_dim=64, text_hidden_dim=TEXT_WIDTH,
        num_text_layers=len(TEXT_LAYERS), text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=128, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    invert_input_layer(transformer.final_layer.linear, transformer.img_in.weight)
    small = {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    vae = diffusers.AutoencoderKLQwenImage(**small).eval()
    return {
        "scheduler": dynamic_scheduler((256, 0.5), (6400, 1.15)), "vae": vae,
        "text_encoder": text_encoder, "tokenizer": tokenizer, "transformer": transformer,
        "text_encoder_select_layers": TEXT_LAYERS,
    }  # fmt: skip
