"""Facts that families state as data: published models, default values, names of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from autotune.plan.job import TimestepSampling
from autotune.system.files import read_table
from autotune.system.lazy import nn

Config = Mapping[str, Any]  # constructor arguments of a model

Rotary = Literal["streams", "complex", "cos_sin", "matrix"]
"""Forms of rotary positions in stock transformers, for pairs of neighboring channels:

- `streams`: (image, text) of complex numbers, each (tokens, head size / 2);
- `complex`: complex numbers (batch, tokens, head size / 2);
- `cos_sin`: (cosines, sines) of all tokens, text first, or of the image's alone, each (tokens, head
  size) with every value twice;
- `matrix`: rotation matrices (..., tokens, 1, head size / 2, 2, 2).
"""


@dataclass(frozen=True)
class Stream:
    """Names of one stream's layers in an attention module; `out` may be absent there."""

    query: str = "to_q"
    key: str = "to_k"
    value: str = "to_v"
    query_norm: str = "norm_q"
    key_norm: str = "norm_k"
    out: str = "to_out"


ADDED_TEXT = Stream(
    "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"
)
"""The text's layers in diffusers' joint attention."""


@dataclass(frozen=True)
class AttentionLayout:
    """Conventions of a stock attention `processor`. Norms are RMSNorms over a head."""

    processor: str
    rotary: Rotary
    rotary_argument: str
    image: Stream = Stream()
    text: Stream | None = None  # comes before the image; None if it is attended to, not joined
    rounds_to_bf16: bool = False  # rotated queries and keys, whatever the compute dtype


@dataclass(frozen=True)
class ModulationLayers:
    """Layers that make the shifts, scales and gates of a transformer's blocks of what an item is
    conditioned on as a whole: noise level, pooled prompt, guidance (AdaLN; Peebles and Xie 2023).
    """

    # Modules with one `SiLU` and one `Linear`, the modulation layer, applied to the activated
    # conditioning. Nothing else may use that.
    owners: str
    embedders: tuple[str, ...]  # whose outputs (items, features) add up to the conditioning
    inputs: tuple[str, ...] = ()  # tensors of a sample besides noise level and guidance

    def find(self, transformer: nn.Module) -> list[tuple[str, str]]:
        """Name every activation and its modulation layer."""
        found = []
        for owner, module in transformer.named_modules():
            if re.fullmatch(self.owners, owner):
                names = {type(child): f"{owner}.{name}" for name, child in module.named_children()}
                found.append((names[nn.SiLU], names[nn.Linear]))
        return found


# 20 images make 2,000 views, the 2,000 steps at batch size 1 of ai-toolkit's examples.
VIEWS_PER_IMAGE = 100
USUAL_IMAGES = 20  # number of images that a job is assumed to have if there is no data yet


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values that a job of this family uses unless the user sets them."""

    learning_rate: float = 1e-4
    resolution_px: int = 1024
    text_tokens: int = 256  # assumed length of an encoded caption if there is no data yet
    preview_steps: int = 28
    sampling_guidance: float  # guidance scale of the model's card or pipeline
    timestep_shift: float = 1.0
    timestep_sampling: TimestepSampling = "logit_normal"
    rank: int = 16
    lora_alpha: float = 16.0
    weight_decay: float = 1e-3  # between diffusers' 1e-4 and torch's 1e-2
    effective_batch_size: int = 4
    preview_calls: int = 2  # in a denoising step: with and without the prompt
    num_frames: int = 1  # frames of a clip if there is no data yet
    frames_per_second: float = 24.0  # rate of the clips that the model makes
    training_guidance: float | None = None  # None if guidance is no input of the transformer
    # Two points (tokens of an image, logarithm of the shift) of the line of the pipeline's
    # scheduler; None if its shift does not depend on the resolution.
    shift_by_tokens: tuple[tuple[int, float], tuple[int, float]] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # where values come from, by field

    def shift_at(self, tokens: int) -> float:
        """Compute the shift for so many tokens, as `calculate_shift` in diffusers."""
        assert self.shift_by_tokens is not None  # checked with the job
        (low, start), (high, end) = self.shift_by_tokens
        return math.exp(start + (end - start) * (tokens - low) / (high - low))

    def batch_for(self, num_processes: int) -> int:
        """Return the effective batch, made larger if so many processes cannot share it evenly."""
        return -(-self.effective_batch_size // num_processes) * num_processes

    def num_steps(self, num_images: int, effective_batch_size: int | None = None) -> int:
        """Return the optimizer steps for a data set of this size, of the usual batch or another."""
        # 500 views and 4,000 steps are the ends of what ai-toolkit's example configurations call a
        # good range; the upper one in steps, since it is images that a large set is short of.
        views = max(500, VIEWS_PER_IMAGE * num_images)
        return min(4000, math.ceil(views / (effective_batch_size or self.effective_batch_size)))


@dataclass(frozen=True)
class Parts:
    """The models around the transformer: they decide what caching and previews take."""

    text_encoder_parameters: tuple[int, ...] = ()  # number of parameters of each text encoder
    # Beyond their weights, for a caption of up to 512 tokens in bf16; 0 if nobody measured it.
    caption_bytes: int = 0
    vae_class: str = ""  # in diffusers; empty if it is unknown
    vae_config: Config = field(default_factory=dict)
    decoder_parameters: int = 0  # of all others that decode, on the device with previews


@dataclass(frozen=True)
class PublishedModel:
    """A model of a family, as it is published."""

    hub_id: str
    name: str  # its short name: for the family's first model that of the family
    # Arguments that build its transformer without downloading anything.
    config: Config = field(default_factory=dict)
    parts: Parts = Parts()
    num_parameters: int = 0  # of the transformer; 0 if it is not stated
    license: str = ""
    source: str = ""  # where the size is published that the transformer was compared with
    note: str = ""  # advice for whoever trains it


@cache
def family_facts(family: str) -> tuple[tuple[PublishedModel, ...], Defaults, Config]:
    """Read the models, defaults and tiny configuration of one of autotune's own families."""
    facts = _with_tuples(read_table("models/facts.yaml")["families"][family])
    models = tuple(
        PublishedModel(**{**model, "parts": Parts(**model["parts"])}) for model in facts["models"]
    )
    return models, Defaults(**facts["defaults"]), facts["tiny_config"]


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return value
