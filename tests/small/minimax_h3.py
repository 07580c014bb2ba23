"""A small MiniMax H3 pipeline."""

import diffusers
import transformers

from autotune.models.latents import image_processor
from tests.small import parts

TEXT_WIDTH, TEXT_LAYERS = 32, 51  # of which it takes the 50th


def build_parts(family, captions):
    tokenizer = parts.qwen_tokenizer(captions, "")
    kind = transformers.Qwen3VLForConditionalGeneration
    transformer = diffusers.MiniMaxH3Transformer3DModel(**parts.SIZES["minimax-h3"])
    parts.invert_input_layer(transformer.proj_out, transformer.proj_in.weight)
    return {
        "scheduler": diffusers.MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
        "vae": diffusers.AutoencoderKLMiniMaxH3(**parts.SIZES["minimax-h3-vae"]).eval(),
        "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio(
            **parts.SIZES["minimax-h3-audio-vae"], latents_mean=(0.0,) * 32, latents_std=(1.0,) * 32
        ).eval(),
        "text_encoder": parts.qwen3_vl(kind, tokenizer, TEXT_WIDTH, TEXT_LAYERS),
        "tokenizer": tokenizer,
        "processor": image_processor("Qwen3VLProcessor")(parts.qwen_image_processor(), tokenizer),
        "transformer": transformer.eval(),
    }
