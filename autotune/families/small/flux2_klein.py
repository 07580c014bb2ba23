"""A small FLUX.2 [klein] pipeline."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from autotune.families.small.parts import QWEN_CHAT, qwen3, qwen_tokenizer

WIDTH, LAST_USED_LAYER = 32, 27
"""Of the text encoder; the pipeline takes the outputs of its layers 9, 18 and 27."""


def write_pipeline(folder: Path, captions: Sequence[str], seed: int) -> None:
    """Write the pipeline: 2 double-stream and 2 single-stream blocks of width 128."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer(captions, QWEN_CHAT)
        text_encoder = qwen3(Qwen3ForCausalLM, tokenizer, hidden_size=WIDTH, num_layers=LAST_USED_LAYER + 1)
        transformer = Flux2Transformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=3 * WIDTH,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        )
        with torch.no_grad():
            transformer.proj_out.weight.copy_(torch.linalg.pinv(transformer.x_embedder.weight))
        vae = AutoencoderKLFlux2(
            block_out_channels=(16, 32, 32, 32), layers_per_block=1, norm_num_groups=8, latent_channels=16
        ).eval()
        vae.bn.running_var.fill_(0.1)  # gives random weights latents of about unit variance
    Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
