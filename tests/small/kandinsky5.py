"""Small Kandinsky 5.0 pipelines, for images and for video."""

import diffusers
import torch

from autotune.models.latents import build_empty_pipeline
from tests.small import parts


def build_parts(family, captions):
    video = family.can_train_clips
    template = build_empty_pipeline(family.pipeline_class).prompt_template
    tokenizer = parts.qwen_tokenizer(captions, template)
    tokenizer_2 = parts.clip_tokenizer(captions)
    text_encoder = parts.qwen_text_encoder(tokenizer, hidden_size=128)
    text_encoder_2 = parts.clip_text_encoder(tokenizer_2, hidden_size=64)
    sizes = parts.SIZES["kandinsky5"]
    transformer = diffusers.Kandinsky5Transformer3DModel(**sizes, visual_cond=video)
    _initialize(transformer)
    vae = parts.image_vae(family)
    if video:
        vae = diffusers.AutoencoderKLHunyuanVideo(**parts.SIZES["kandinsky5-video-vae"]).eval()
    return {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": parts.qwen_processor(tokenizer),
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": tokenizer_2,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0 if video else 3.0),
    }


def _initialize(transformer):
    """Give random values to the modulation: of the class's zeros an adapter gets no gradient."""
    for name, parameter in transformer.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    # Channels go in innermost and come out outermost; conditioning channels go in only.
    first = transformer.visual_embeddings.in_layer.weight
    patches = first.unflatten(1, (4, -1))[:, :, :16].transpose(1, 2)
    parts.invert_input_layer(transformer.out_layer.out_layer, patches.flatten(1))
