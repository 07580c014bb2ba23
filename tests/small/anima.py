"""A small Anima pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers

from autotune.models.family import Family
from tests.small.parts import invert_input_layer, qwen3, qwen_tokenizer, t5_tokenizer

TEXT_WIDTH = 64


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    tokenizer = qwen_tokenizer(captions, "")
    t5_words = t5_tokenizer(captions, max_length=512)
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=TEXT_WIDTH, target_dim=TEXT_WIDTH, model_dim=TEXT_WIDTH, num_layers=2,
        num_attention_heads=2, target_vocab_size=len(t5_words),
    )  # fmt: skip
    transformer = family.build_transformer(
        {
            **family.transformer_config, "num_layers": 4, "num_attention_heads": 2,
            "attention_head_dim": 64, "text_embed_dim": TEXT_WIDTH, "adaln_lora_dim": 16,
        }
    )  # fmt: skip
    invert_input_layer(transformer.proj_out, transformer.patch_embed.proj.weight[:, :64])
    small = {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": diffusers.AutoencoderKLQwenImage(**small).eval(),
        "text_encoder": qwen3(transformers.Qwen3Model, tokenizer, TEXT_WIDTH, num_layers=2),
        "text_conditioner": conditioner.eval(), "tokenizer": tokenizer, "t5_tokenizer": t5_words,
        "transformer": transformer.eval(),
    }  # fmt: skip
