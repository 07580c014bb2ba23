"""A small Z-Image pipeline."""

from collections.abc import Sequence
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from autotune.models.family import Family
from tests.small.parts import QWEN_CHAT, flux_vae, invert_input_layer, qwen3, qwen_tokenizer


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline: 4 blocks of width 128 after refiners of one block each."""
    tokenizer = qwen_tokenizer(captions, QWEN_CHAT)
    text_encoder = qwen3(Qwen3Model, tokenizer, hidden_size=128, num_layers=2)
    transformer = ZImageTransformer2DModel(
        dim=128,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=128,
        axes_dims=[8, 12, 12],
    )
    invert_input_layer(
        transformer.all_final_layer["2-1"].linear, transformer.all_x_embedder["2-1"].weight
    )
    vae = flux_vae()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
