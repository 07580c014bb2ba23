"""A small Z-Image pipeline."""

import diffusers
import transformers

from tests.small.parts import QWEN_CHAT, SIZES, image_vae, invert_input_layer, qwen3, qwen_tokenizer


def build_parts(family, captions):
    tokenizer = qwen_tokenizer(captions, QWEN_CHAT)
    text_encoder = qwen3(transformers.Qwen3Model, tokenizer, hidden_size=128, num_layers=2)
    transformer = diffusers.ZImageTransformer2DModel(**SIZES["z-image"])
    first = transformer.all_x_embedder["2-1"].weight
    invert_input_layer(transformer.all_final_layer["2-1"].linear, first)
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": image_vae(family),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }
