"""A small Stable Diffusion XL pipeline."""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
import transformers

from autotune.models.family import Family
from tests.small.parts import clip_text_encoder, clip_tokenizer, image_vae


def build_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    tokenizer = clip_tokenizer(captions)
    text_encoder = clip_text_encoder(tokenizer, hidden_size=64)
    text_encoder_2 = transformers.CLIPTextModelWithProjection(text_encoder.config).eval()
    small = {
        "block_out_channels": (32, 64, 64), "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1, 2), "attention_head_dim": (1, 2, 2),
        "norm_num_groups": 8, "cross_attention_dim": 128, "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64 + 6 * 8,
    }  # fmt: skip
    unet = diffusers.UNet2DConditionModel(**{**family.models[0].config, **small})
    _pass_input_through(unet)
    return {
        "vae": image_vae(family),
        "text_encoder": text_encoder,
        "text_encoder_2": text_encoder_2,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "unet": unet,
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            timestep_spacing="leading",
        ),
    }  # fmt: skip


@torch.no_grad()
def _pass_input_through(unet: Any) -> None:
    """Let the UNet begin by predicting about its input, as `parts.invert_input_layer`: the first
    layer's output skips all but the last stage and its activation, silu(x) - silu(-x) = x."""
    channels, width = unet.conv_out.out_channels, unet.conv_in.out_channels
    half = torch.nn.functional.normalize(torch.randn(width // 2, channels))
    doubled = torch.stack([half, -half], dim=1).flatten(0, 1)
    for conv, center in ((unet.conv_in, doubled), (unet.conv_out, torch.linalg.pinv(doubled) * 2)):
        conv.weight.zero_()
        conv.weight[:, :, 1, 1] = center
        conv.bias.zero_()
    last = unet.up_blocks[-1].resnets[-1]
    last.conv2.weight.mul_(0.2)
    # Of the stage's own output, then of the skipped one.
    shortcut = last.conv_shortcut.weight[:, :, 0, 0]
    shortcut.mul_(0.2)[:, -width:] = torch.eye(width)
