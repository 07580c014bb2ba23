"""Small Qwen-Image pipelines: for text to image, for editing, and 2.1."""

import diffusers
import transformers

from autotune.models.latents import build_empty_pipeline, image_processor
from tests.small.parts import (
    QWEN_VL_CHAT,
    SIZES,
    dynamic_scheduler,
    invert_input_layer,
    qwen3_vl,
    qwen_image_processor,
    qwen_processor,
    qwen_text_encoder,
    qwen_tokenizer,
    qwen_vae,
)


def build_parts(family, captions):
    parts = _build_21(captions) if "2.1" in family.name else _build(family, captions)
    transformer = parts["transformer"]
    invert_input_layer(transformer.proj_out, transformer.img_in.weight)
    scheduler = dynamic_scheduler((256, 0.5), (8192, 0.9), shift_terminal=0.02)
    return {**parts, "scheduler": scheduler}


def _build(family, captions):
    template = build_empty_pipeline(family.pipeline_class).prompt_template_encode
    tokenizer = qwen_tokenizer(captions, template)
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": qwen_text_encoder(tokenizer, hidden_size=128),
        "transformer": diffusers.QwenImageTransformer2DModel(**SIZES["qwen-image"]),
        "vae": qwen_vae(),
    }
    return {**parts, "processor": qwen_processor(tokenizer)} if family.max_controls else parts


def _build_21(captions):
    template = "system\nComprehend and analyze the provided prompt.user\nassistant\n"
    tokenizer = qwen_tokenizer(captions, template)
    kind = transformers.Qwen3VLForConditionalGeneration
    return {
        "processor": image_processor("Qwen3VLProcessor")(
            qwen_image_processor(patch_size=16), tokenizer, chat_template=QWEN_VL_CHAT
        ),
        "text_encoder": qwen3_vl(kind, tokenizer, hidden_size=64, num_layers=2),
        "transformer": diffusers.QwenImage21Transformer2DModel(**SIZES["qwen-image-2.1"]),
        "vae": diffusers.AutoencoderKLQwenImage21(**SIZES["qwen-image-2.1-vae"]).eval(),
    }
