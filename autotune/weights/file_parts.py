"""VAEs and text encoders in single files: of their own, or within a checkpoint that holds the DiT
or UNet as well.

source = view_part(open_weights(file), "vae", vae)      # as `single_file.view_as` does for the DiT or UNet
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autotune.weights.single_file import (
    Conversion,
    diffusers_conversion,
    make_view,
    read_part,
    shapes_of,
)
from autotune.weights.sources import WeightSource

State = dict[str, Tensor]

OPEN_CLIP = "conditioner.embedders.1.model."
OPEN_CLIP_LAYER = "transformer.resblocks.0.ln_1.weight"
TURNED = "text_projection.weight"
"""The weight of OpenCLIP that is stored with columns as rows."""
PART_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("conditioner.embedders.0.transformer.", "text_encoders.clip_l.transformer."),
    "text_encoder_2": (
        OPEN_CLIP,
        "text_encoders.clip_g.transformer.",
        "text_encoders.t5xxl.transformer.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.",),
}
"""What the names of each component begin with in a checkpoint that holds others, too:
Stability's and ComfyUI's.
"""
NESTED = re.compile(
    r"(?P<side>encoder|decoder)\.(?P<way>down|up)samples\.(?P<stage>\d+)\.(?P=way)samples\.(?P<number>\d+)\.(?P<part>.+)"
)
"""A layer of the VAE of Wan 2.2, whose stages hold their blocks and then the one that changes
the size.
"""
NESTED_LAYERS = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}
IGNORED = ("position_ids", "logit_scale", "spiece_model", "tekken_model")
"""Endings of what is no weight of a text encoder."""
HEADS = ("text_projection", "lm_head")
"""Layers that files of text encoders may have and pipelines do not use."""


def has_part(source: WeightSource, name: str) -> bool:
    """Whether a checkpoint holds the component `name` beside the DiT or UNet."""
    return any(each.startswith(PART_PREFIXES.get(name, ())) for each in source.locations)


def view_part(source: WeightSource, name: str, model: nn.Module) -> WeightSource:
    """The component `name` of a single file, under the names that a folder in the diffusers layout
    has.

    Raises KeyMismatch and BadWeights as `view_as`.
    """
    part = read_part(source, PART_PREFIXES.get(name, ()))
    if name == "vae":
        shapes = shapes_of(model)
        has_own_names = shapes.keys() <= part.tensors.keys()
        return make_view(
            part, model, None if has_own_names else VAES.get(type(model).__name__), shapes
        )
    unused = tuple(f"{head}." for head in HEADS if not hasattr(model, head))
    tensors = {
        key: entry
        for key, entry in part.tensors.items()
        if not key.endswith(IGNORED) and not key.startswith(unused)
    }
    part = part._replace(tensors=tensors)
    if OPEN_CLIP_LAYER in tensors:
        return make_view(part, model, _open_clip, {}, {TURNED})
    return make_view(part, model, None, {})


def _ldm_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return diffusers_conversion("AutoencoderKL")(state, config)


def _wan_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Wan 2.1's by diffusers' conversion; of what Wan 2.2 nests in each stage the stages by a
    map of our own.
    """
    nested = {name: match for name in state if (match := NESTED.match(name))}
    found = diffusers_conversion("AutoencoderKLWan")(
        {n: each for n, each in state.items() if n not in nested}, config
    )
    return {**found, **{_unnest(match): state[name] for name, match in nested.items()}}


def _unnest(name: re.Match[str]) -> str:
    stage, way, number, part = name["stage"], name["way"], name["number"], name["part"]
    for original, layer in NESTED_LAYERS.items():
        if part.startswith(original):
            return f"{name['side']}.{way}_blocks.{stage}.resnets.{number}.{layer}{part.removeprefix(original)}"
    return f"{name['side']}.{way}_blocks.{stage}.{way}sampler.{part}"


def _flux2_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """That of FLUX.1 with the outer convolutions inside encoder and decoder, and a norm of the
    latents.
    """
    moved = {
        re.sub(r"(?:en|de)coder\.((?:post_)?quant_conv\.)", r"\1", key): tensor
        for key, tensor in state.items()
    }
    norm = {key: tensor for key, tensor in state.items() if key.startswith("bn.")}
    return {**_ldm_vae(moved, config), **norm}


def _open_clip(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    found: dict[str, Tensor] = convert_open_clip_checkpoint(None, state, prefix="")
    return {name: tensor.T if name == TURNED else tensor for name, tensor in found.items()}


VAES: Mapping[str, Conversion] = {
    "AutoencoderKL": _ldm_vae,
    "AutoencoderKLWan": _wan_vae,
    "AutoencoderKLQwenImage": _wan_vae,
    "AutoencoderKLQwenImage21": _wan_vae,
    "AutoencoderKLFlux2": _flux2_vae,
}
"""How the authors' names become diffusers', by class: Qwen-Image's VAE is laid out as Wan 2.1's,
that of Qwen-Image 2.1 as Wan 2.2's, with a dimension of time of size 1."""
