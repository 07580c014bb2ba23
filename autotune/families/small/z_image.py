"""A small Z-Image pipeline."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from autotune.families.small.parts import QWEN_CHAT, flux_vae, invert_input_layer, qwen3, qwen_tokenizer


def write_pipeline(folder: Path, captions: Sequence[str], seed: int) -> None:
    """Write the pipeline: 4 blocks of width 128 after refiners of one block each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
        invert_input_layer(transformer.all_final_layer["2-1"].linear, transformer.all_x_embedder["2-1"].weight)
        vae = flux_vae()
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
