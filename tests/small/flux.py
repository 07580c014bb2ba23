"""Small pipelines of FLUX.1, for text to image and for editing, Chroma, FLUX.2 and FLUX.3."""

import diffusers
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from autotune.models.latents import image_processor
from tests.small import parts

TEXT_WIDTH = 32  # of the text encoders of FLUX.2 and 3
TEXT_LAYERS = 32  # of FLUX.3's, of which the 4th to 32nd are taken


def build_parts(family, captions):
    kinds = {"flux2-klein": _build_flux2, "flux2-dev": _build_flux2, "flux3": _build_flux3}
    return kinds.get(family.name, _build_flux1)(family, captions)


def _build_flux1(family, captions):
    made = _build_chroma(captions) if family.name == "chroma" else _build_dev(captions)
    transformer = made["transformer"]
    parts.invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    return {**made, "vae": parts.image_vae(family)}


def _build_dev(captions):
    tokenizer = parts.clip_tokenizer(captions)
    tokenizer_2 = parts.t5_tokenizer(captions, max_length=512)
    return {
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
        "text_encoder": parts.clip_text_encoder(tokenizer, hidden_size=64),
        "text_encoder_2": parts.t5_encoder(tokenizer_2, hidden_size=128),
        "transformer": diffusers.FluxTransformer2DModel(
            **parts.SIZES["flux1"], pooled_projection_dim=64, guidance_embeds=True
        ),
        "scheduler": parts.dynamic_scheduler((256, 0.5), (4096, 1.15), shift=3.0),
    }


def _build_chroma(captions):
    tokenizer = parts.t5_tokenizer(captions, max_length=512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": parts.t5_encoder(tokenizer, hidden_size=128),
        "transformer": diffusers.ChromaTransformer2DModel(
            **parts.SIZES["flux1"], approximator_hidden_dim=128, approximator_layers=2
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _build_flux2(family, captions):
    is_dev = family.name == "flux2-dev"
    if is_dev:  # the pipelines take the outputs of layers 10, 20 and 30, or 9, 18 and 27
        chat = parts.MISTRAL_CHAT
        tokenizer = parts.qwen_tokenizer([*captions, SYSTEM_MESSAGE], chat, chat=chat)
        text_encoder = parts.mistral3(tokenizer, TEXT_WIDTH, num_layers=31)
    else:
        tokenizer = parts.qwen_tokenizer(captions, parts.QWEN_CHAT)
        kind = transformers.Qwen3ForCausalLM
        text_encoder = parts.qwen3(kind, tokenizer, TEXT_WIDTH, num_layers=28)
    sizes = parts.SIZES["flux2"]
    transformer = diffusers.Flux2Transformer2DModel(**sizes, guidance_embeds=is_dev)
    parts.invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {
        "scheduler": scheduler,
        "vae": small_vae(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def small_vae():
    vae = diffusers.AutoencoderKLFlux2(**parts.SIZES["flux2-vae"]).eval()
    vae.bn.running_var.fill_(0.1)  # gives random weights latents of about unit variance
    return vae


def _build_flux3(family, captions):
    words = parts.qwen_tokenizer(captions, parts.QWEN_CHAT)
    kind = transformers.Qwen3VLForConditionalGeneration
    transformer = diffusers.Flux3Transformer2DModel(**parts.SIZES["flux3"])
    parts.invert_input_layer(transformer.proj_out, transformer.x_embedders["image"].weight)
    return {
        "vae": small_vae(),
        "text_encoder": parts.qwen3_vl(kind, words, TEXT_WIDTH, TEXT_LAYERS),
        "tokenizer": image_processor("Qwen3VLProcessor")(
            parts.qwen_image_processor(), words, parts.QWEN_CHAT
        ),
        "transformer": transformer.eval(),
    }
