"""Small FLUX.2 pipelines, [klein] and [dev]."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from autotune.models.family import Family
from tests.small import parts

TEXT_WIDTH = 32


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    is_dev = family.name == "flux2-dev"
    if is_dev:  # the pipelines take the outputs of layers 10, 20 and 30, or 9, 18 and 27
        tokenizer = parts.qwen_tokenizer(
            [*captions, SYSTEM_MESSAGE], parts.MISTRAL_CHAT, chat=parts.MISTRAL_CHAT
        )
        text_encoder = parts.mistral3(tokenizer, TEXT_WIDTH, num_layers=31)
    else:
        tokenizer = parts.qwen_tokenizer(captions, parts.QWEN_CHAT)
        text_encoder = parts.qwen3(
            transformers.Qwen3ForCausalLM, tokenizer, TEXT_WIDTH, num_layers=28
        )
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=3 * TEXT_WIDTH, axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=is_dev,
    )  # fmt: skip
    parts.invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {
        "scheduler": scheduler, "vae": small_vae(), "text_encoder": text_encoder,
        "tokenizer": tokenizer, "transformer": transformer,
    }  # fmt: skip


def small_vae() -> Any:
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=16,
    ).eval()
    vae.bn.running_var.fill_(0.1)  # gives random weights latents of about unit variance
    return vae
