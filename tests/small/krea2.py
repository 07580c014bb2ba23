"""A small Krea 2 pipeline."""

import diffusers
import transformers

from autotune.models.latents import build_empty_pipeline
from tests.small import parts

TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)  # of the text encoder: the outputs that are used


def build_parts(family, captions):
    stock = build_empty_pipeline("Krea2Pipeline")
    template = stock.prompt_template_encode_prefix + stock.prompt_template_encode_suffix
    tokenizer = parts.qwen_tokenizer(captions, template)
    text_encoder = parts.qwen3_vl(transformers.Qwen3VLModel, tokenizer, TEXT_WIDTH, TEXT_LAYERS[-1])
    transformer = diffusers.Krea2Transformer2DModel(**parts.SIZES["krea2"])
    parts.invert_input_layer(transformer.final_layer.linear, transformer.img_in.weight)
    return {
        "scheduler": parts.dynamic_scheduler((256, 0.5), (6400, 1.15)),
        "vae": parts.qwen_vae(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
        "text_encoder_select_layers": TEXT_LAYERS,
    }
