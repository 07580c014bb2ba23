"""A small MiniMax H3 pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from autotune.models.latents import image_processor
from tests.small.parts import invert_input_layer, qwen3_vl, qwen_image_processor, qwen_tokenizer

TEXT_WIDTH, TEXT_LAYERS = 32, 51  # of which it takes the 50th


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    tokenizer = qwen_tokenizer(captions, "")
    kind = transformers.Qwen3VLForConditionalGeneration
    transformer = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=64, hidden_size=128, num_layers=4,
        num_refiner_layers=1, ffn_dim=256, text_dim=TEXT_WIDTH, freq_dim=32,
        time_embed_hidden_dim=64, time_embed_dim=32, rope_freq_dim=8,
    )  # fmt: skip
    invert_input_layer(transformer.proj_out, transformer.proj_in.weight)
    return {
        "scheduler": diffusers.MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
        "vae": diffusers.AutoencoderKLMiniMaxH3(
            block_out_channels=(16, 16, 32, 32), layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2, 2), temporal_downsample_factors=(1, 2, 2, 1),
            norm_num_groups=8, decoder_num_layers=1, decoder_num_attention_heads=2,
            decoder_attention_head_dim=32, decoder_ffn_mult=2,
        ).eval(),
        "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            latent_dim=128,
            num_attention_heads=2,
            decoder_dim=128,
            latents_mean=(0.0,) * 32,
            latents_std=(1.0,) * 32,
        ).eval(),
        "text_encoder": qwen3_vl(kind, tokenizer, TEXT_WIDTH, TEXT_LAYERS),
        "tokenizer": tokenizer,
        "processor": image_processor("Qwen3VLProcessor")(qwen_image_processor(), tokenizer),
        "transformer": transformer.eval(),
    }  # fmt: skip
