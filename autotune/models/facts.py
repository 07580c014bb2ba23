"""Facts that families state as data: published models, default values, names of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune.plan.job import TimestepSampling
from autotune.system.lazy import nn

Config = Mapping[str, Any]
"""Constructor arguments of a model."""

Rotary = Literal["streams", "complex", "cos_sin", "matrix"]
"""How the stock transformer hands over rotary positions, for pairs of neighboring channels:

- `streams`: (image, text) of complex numbers, each (tokens, head size / 2);
- `complex`: complex numbers (batch, tokens, head size / 2);
- `cos_sin`: (cosines, sines) of all tokens, text first, or of the image's alone, each (tokens, head
  size) with every value twice;
- `matrix`: rotation matrices (..., tokens, 1, head size / 2, 2, 2).
"""


@dataclass(frozen=True)
class Stream:
    """Names of one stream's layers in an attention module."""

    query: str = "to_q"
    key: str = "to_k"
    value: str = "to_v"
    query_norm: str = "norm_q"
    key_norm: str = "norm_k"
    out: str = "to_out"
    """Layers that the attention's output goes through, if the module has them."""


ADDED_TEXT = Stream(
    "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"
)
"""The text's layers in diffusers' joint attention."""


@dataclass(frozen=True)
class AttentionLayout:
    """Conventions of a stock attention processor. Norms are RMSNorms over a head."""

    processor: str
    """Class name in diffusers."""
    rotary: Rotary
    rotary_argument: str
    """The argument of the processor that holds rotary positions."""
    image: Stream = Stream()
    text: Stream | None = None
    """Layers of the text, which comes before the image; None if what comes as text is attended
    to, not joined."""
    rounds_to_bf16: bool = False
    """Whether rotated queries and keys are rounded to bf16 whatever the compute dtype."""


@dataclass(frozen=True)
class ModulationLayers:
    """Layers that make the shifts, scales and gates of a transformer's blocks of what an item is
    conditioned on as a whole: its noise level, a pooled prompt, guidance (AdaLN; Peebles and Xie
    2023)."""

    owners: str
    """Regular expression for the names of modules that each have one `SiLU` and one `Linear`, the
    modulation layer, applied to the activated conditioning. Nothing else may use that."""
    embedders: tuple[str, ...]
    """Modules whose outputs (items, features) add up to the conditioning, in order of calls."""
    inputs: tuple[str, ...] = ()
    """Tensors of a sample that it depends on, besides noise level and guidance."""

    def layer_names(self, owner: str, module: nn.Module) -> tuple[str, str]:
        """Name the owner's activation and its modulation layer."""
        kinds = {type(child): f"{owner}.{name}" for name, child in module.named_children()}
        return kinds[nn.SiLU], kinds[nn.Linear]

    def find(self, transformer: nn.Module) -> list[tuple[str, str]]:
        """Name every activation and its modulation layer."""
        modules = transformer.named_modules()
        owners = ((name, module) for name, module in modules if re.fullmatch(self.owners, name))
        return [self.layer_names(name, module) for name, module in owners]


VIEWS_PER_IMAGE = 100
"""Times that an image is seen: 20 images make 2,000 views, the 2,000 steps at batch size 1 of
ai-toolkit's examples."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values that a job of this family uses unless the user sets them."""

    learning_rate: float = 1e-4
    resolution_px: int = 1024
    text_tokens: int = 256
    """Assumed length of an encoded caption if there is no data yet."""
    preview_steps: int = 28
    sampling_guidance: float
    """Guidance scale of the model's card or pipeline."""
    timestep_shift: float = 1.0
    timestep_sampling: TimestepSampling = "logit_normal"
    rank: int = 16
    lora_alpha: float = 16.0
    weight_decay: float = 1e-3
    """Between diffusers' 1e-4 and torch's 1e-2."""
    effective_batch_size: int = 4
    preview_calls: int = 2
    """Calls per denoising step: with and without the prompt, unless guidance is an input."""
    num_frames: int = 1
    """Frames of a clip if there is no data yet."""
    frames_per_second: float = 24.0
    """Rate of the clips that the model makes."""
    training_guidance: float | None = None
    """Guidance that the transformer gets as an input in training; None if it has no such input."""
    shift_by_tokens: tuple[tuple[int, float], tuple[int, float]] | None = None
    """Two points (tokens of an image, logarithm of the shift) of the straight line that the
    pipeline's scheduler follows; None if its shift does not depend on the resolution."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where values come from, by field."""

    def shift_at(self, tokens: int) -> float:
        """Compute the shift for so many tokens, if it depends on the resolution, as
        `calculate_shift` in diffusers."""
        assert self.shift_by_tokens is not None  # checked with the job
        (low, start), (high, end) = self.shift_by_tokens
        return math.exp(start + (end - start) * (tokens - low) / (high - low))

    def batch_for(self, num_processes: int) -> int:
        """Return the effective batch, made larger if so many processes cannot share it evenly."""
        return -(-self.effective_batch_size // num_processes) * num_processes

    def num_steps(self, num_images: int) -> int:
        """Return the optimizer steps for a data set of this size."""
        # 500 views and 4,000 steps are the ends of what ai-toolkit's example configurations call a
        # good range; the upper one in steps of our effective batch, since it is images that a
        # large set is short of.
        views = max(500, VIEWS_PER_IMAGE * num_images)
        return min(4000, math.ceil(views / self.effective_batch_size))


@dataclass(frozen=True)
class Parts:
    """The models around the transformer: they decide what caching and previews take."""

    text_encoder_parameters: tuple[int, ...] = ()
    """Number of parameters of each text encoder."""
    vae_class: str = ""
    """Class name in diffusers; empty if it is unknown."""
    vae_config: Config = field(default_factory=dict)
    """Constructor arguments of the published autoencoder."""
    decoder_parameters: int = 0
    """Number of parameters of all other models that decode, on the device with previews."""


@dataclass(frozen=True)
class PublishedModel:
    """A model of a family, as it is published."""

    hub_id: str
    name: str
    """Its short name: for the family's first model that of the family."""
    config: Config
    """Arguments that build its transformer without downloading anything."""
    parts: Parts
    num_parameters: int = 0
    """Number of parameters of the transformer that `config` builds; 0 if it is not stated."""
    license: str = ""
    """License that its card names."""
    source: str = ""
    """Where its size is published, if the transformer that `config` builds was compared with it."""
    note: str = ""
    """Advice for whoever trains it."""

    def variant(
        self, hub_id: str, name: str, *, note: str = "", source: str = ""
    ) -> PublishedModel:
        """Return another model of the same architecture and license."""
        return replace(self, hub_id=hub_id, name=name, note=note, source=source)
