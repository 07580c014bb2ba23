"""Small pipelines of Stable Diffusion XL and 3.5."""

import diffusers
import torch
import transformers

from tests.small import parts


def build_parts(family, captions):
    return (_build_sdxl if family.name == "sdxl" else _build_sd35)(family, captions)


def _build_sd35(family, captions):
    tokenizer = parts.clip_tokenizer(captions)
    tokenizer_3 = parts.t5_tokenizer(captions, max_length=256)
    clip = parts.clip_text_encoder(tokenizer, hidden_size=64).config
    transformer = diffusers.SD3Transformer2DModel(**parts.SIZES["sd3.5"])
    patches = transformer.pos_embed.proj.weight
    patches.data.mul_(4)  # or positions, which are added to them, would be half of what comes out
    # Channels are innermost there.
    parts.invert_input_layer(transformer.proj_out, patches.permute(0, 2, 3, 1).flatten(1))
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": parts.image_vae(family),
        "text_encoder": transformers.CLIPTextModelWithProjection(clip).eval(),
        "tokenizer": tokenizer,
        "text_encoder_2": transformers.CLIPTextModelWithProjection(clip).eval(),
        "tokenizer_2": tokenizer,
        "text_encoder_3": parts.t5_encoder(tokenizer_3, hidden_size=128),
        "tokenizer_3": tokenizer_3,
        "transformer": transformer,
    }


def _build_sdxl(family, captions):
    tokenizer = parts.clip_tokenizer(captions)
    text_encoder = parts.clip_text_encoder(tokenizer, hidden_size=64)
    text_encoder_2 = transformers.CLIPTextModelWithProjection(text_encoder.config).eval()
    unet = diffusers.UNet2DConditionModel(**{**family.models[0].config, **parts.SIZES["sdxl"]})
    _pass_input_through(unet)
    return {
        "vae": parts.image_vae(family),
        "text_encoder": text_encoder,
        "text_encoder_2": text_encoder_2,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "unet": unet,
        "scheduler": diffusers.EulerDiscreteScheduler(**parts.SIZES["sdxl-scheduler"]),
    }


@torch.no_grad()
def _pass_input_through(unet):
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
