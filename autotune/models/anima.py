"""Anima: 28 blocks of Cosmos-Predict2, Qwen3 0.6B and its conditioner, Qwen-Image's VAE."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from autotune.models import facts, family, latents, modular
from autotune.system.lazy import Tensor, nn

TEXT_TOKENS = 512  # of every prompt: the conditioner fills it up with zeros


class Anima(modular.ModularFamily):
    """Text to image. The conditioner, which makes one text of Qwen3's and of T5's tokens, is not
    adapted, as its makers advise."""

    name = "anima"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"anima-base": "anima", "anima-base-v1.0": "anima", "circlestone-labs/Anima": "anima"}
    fine_tunes = ("anima aesthetic", "anima turbo", "anima preview", "anima yume")
    pipeline_class = "AnimaModularPipeline"
    workflow = "text2image"
    text_blocks = ("text_encoder", "denoise.text_conditioning")
    components = (
        *("transformer", "vae", "text_encoder", "text_conditioner"),
        *("tokenizer", "t5_tokenizer", "scheduler"),
    )
    connectors = ("text_conditioner",)
    transformer_class = "CosmosTransformer3DModel"
    max_side_px = 2048  # its table of positions has 128
    prompt_size = (("text_embed_dim", 1024),)
    max_text_tokens = TEXT_TOKENS
    target_sets = latents.adapted_layers(
        r"transformer_blocks\.\d+",
        r"attn[12]\.(to_q|to_k|to_v|to_out\.0)",
        r"ff\.net\.(0\.proj|2)",
        r"norm[123]\.linear_[12]",
    )
    fp16_overflow = (
        "ComfyUI keeps what its blocks add to in fp32 (comfy/ldm/cosmos/predict2.py, 523fba4)"
    )
    excluded = {
        "modulation": "its modulation layers are pairs of low rank, and hold 9% of the weights",
        "norm_rope": "it rotates halves of a head, where the function rotates neighbors",
    }

    def build_transformer(self, config: facts.Config) -> nn.Module:
        module: Any = import_module("diffusers.models.transformers.transformer_cosmos")
        if not hasattr(module, "transforms"):
            module.transforms = _TRANSFORMS
        return super().build_transformer(config)

    def predict(
        self, transformer: Any, noisy: Tensor, levels: Tensor, batch: family.Batch
    ) -> Tensor:
        velocity: Tensor = transformer(
            hidden_states=noisy,
            timestep=levels,
            encoder_hidden_states=batch["prompt_embeds"],
            padding_mask=noisy.new_zeros(1, 1, *noisy.shape[3:]),
            return_dict=False,
        )[0]
        return velocity


# It resizes a mask of zeros by torchvision, which nothing else needs; so does torchvision.
_TRANSFORMS = SimpleNamespace(
    InterpolationMode=SimpleNamespace(NEAREST="nearest"),
    functional=SimpleNamespace(
        resize=lambda mask, size, interpolation: nn.functional.interpolate(
            mask, size, mode=interpolation
        )
    ),
)
