"""A small Krea 2 pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from autotune.models.latents import build_empty_pipeline
from tests.small.parts import (
    SIZES,
    dynamic_scheduler,
    invert_input_layer,
    qwen3_vl,
    qwen_tokenizer,
    qwen_vae,
)

TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)  # of the text encoder: the outputs that are used


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    stock = build_empty_pipeline("Krea2Pipeline")
    template = stock.prompt_template_encode_prefix + stock.prompt_template_encode_suffix
    tokenizer = qwen_tokenizer(captions, template)
    text_encoder = qwen3_vl(transformers.Qwen3VLModel, tokenizer, TEXT_WIDTH, TEXT_LAYERS[-1])
    transformer = diffusers.Krea2Transformer2DModel(**SIZES["krea2"])
    invert_input_layer(transformer.final_layer.linear, transformer.img_in.weight)
    return {
        "scheduler": dynamic_scheduler((256, 0.5), (6400, 1.15)),
        "vae": qwen_vae(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
        "text_encoder_select_layers": TEXT_LAYERS,
    }
