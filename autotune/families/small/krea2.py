"""A small Krea 2 pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Krea2Transformer2DModel,
)
from transformers import Qwen3VLConfig, Qwen3VLModel

from autotune.families.base import build_empty_pipeline
from autotune.families.small.parts import invert_input_layer, qwen_tokenizer

TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)
"""Of the text encoder; the pipeline takes the outputs of these layers."""


def write_pipeline(folder: Path, captions: Sequence[str], seed: int) -> None:
    """Write the pipeline: 4 blocks of width 128, with 4 heads for queries and 2 for keys."""
    stock = build_empty_pipeline("Krea2Pipeline")
    template = stock.prompt_template_encode_prefix + stock.prompt_template_encode_suffix
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer(captions, template)
        text_encoder = _text_encoder(tokenizer)
        transformer = Krea2Transformer2DModel(
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            timestep_embed_dim=64,
            text_hidden_dim=TEXT_WIDTH,
            num_text_layers=len(TEXT_LAYERS),
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=128,
            axes_dims_rope=(8, 12, 12),
        )
        invert_input_layer(transformer.final_layer.linear, transformer.img_in.weight)
        vae = AutoencoderKLQwenImage(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval()
    Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        text_encoder_select_layers=TEXT_LAYERS,
    ).save_pretrained(folder)


def _text_encoder(tokenizer: Any) -> Any:
    """A `Qwen3VLModel` of as many layers as are used, with a one-layer vision tower."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": TEXT_WIDTH * 2,
        "num_hidden_layers": TEXT_LAYERS[-1],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image_token", "image_pad"),
            ("video_token", "video_pad"),
            ("vision_start_token", "vision_start"),
            ("vision_end_token", "vision_end"),
        )
    }
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision, **ids)).eval()
