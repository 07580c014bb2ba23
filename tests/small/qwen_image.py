"""Small Qwen-Image pipelines: for text to image, for editing, and 2.1."""

import diffusers
import transformers

from autotune.models.latents import build_empty_pipeline, image_processor
from tests.small import parts as small_parts


def build_parts(family, captions):
    parts = _build_21(captions) if "2.1" in family.name else _build(family, captions)
    transformer = parts["transformer"]
    small_parts.invert_input_layer(transformer.proj_out, transformer.img_in.weight)
    scheduler = small_parts.dynamic_scheduler((256, 0.5), (8192, 0.9), shift_terminal=0.02)
    return {**parts, "scheduler": scheduler}


def _build(family, captions):
    template = build_empty_pipeline(family.pipeline_class).prompt_template_encode
    tokenizer = small_parts.qwen_tokenizer(captions, template)
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": small_parts.qwen_text_encoder(tokenizer, hidden_size=128),
        "transformer": diffusers.QwenImageTransformer2DModel(**small_parts.SIZES["qwen-image"]),
        "vae": small_parts.qwen_vae(),
    }
    return (
        {**parts, "processor": small_parts.qwen_processor(tokenizer)}
        if family.max_controls
        else parts
    )


def _build_21(captions):
    template = "system\nComprehend and analyze the provided prompt.user\nassistant\n"
    tokenizer = small_parts.qwen_tokenizer(captions, template)
    kind = transformers.Qwen3VLForConditionalGeneration
    return {
        "processor": image_processor("Qwen3VLProcessor")(
            small_parts.qwen_image_processor(patch_size=16),
            tokenizer,
            chat_template=small_parts.QWEN_VL_CHAT,
        ),
        "text_encoder": small_parts.qwen3_vl(kind, tokenizer, hidden_size=64, num_layers=2),
        "transformer": diffusers.QwenImage21Transformer2DModel(
            **small_parts.SIZES["qwen-image-2.1"]
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(**small_parts.SIZES["qwen-image-2.1-vae"]).eval(),
    }
