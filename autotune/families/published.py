"""What is known of a family's published models, and what a job uses unless the user says
otherwise: data alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.schema import TimestepSampling

Config = Mapping[str, Any]
"""Constructor arguments of a transformer."""

VIEWS_PER_IMAGE = 100
"""Times that an image is seen: 20 images make 2,000 views, the 2,000 steps at batch size 1 of
ai-toolkit's examples.
"""


@dataclass(frozen=True)
class Defaults:
    """Values that a job of this family uses unless the user sets them; `sources` says where they
    come from.
    """

    learning_rate: float
    resolution_px: int
    text_tokens: int
    """Assumed length of an encoded caption if there is no data yet."""
    preview_steps: int
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
    """Calls of the transformer per denoising step: with and without the prompt, unless guidance
    is an input of it.
    """
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
        """The shift for so many tokens, if it depends on the resolution: `calculate_shift` in
        diffusers.
        """
        assert self.shift_by_tokens is not None  # checked with the job
        (low, start), (high, end) = self.shift_by_tokens
        return math.exp(start + (end - start) * (tokens - low) / (high - low))

    def batch_for(self, num_processes: int) -> int:
        """The effective batch, made larger where so many processes could not share it evenly."""
        return -(-self.effective_batch_size // num_processes) * num_processes

    def num_steps(self, num_images: int) -> int:
        """Optimizer steps for a data set of this size: each image is seen about a hundred times.

        At least 500 images are seen and at most 4,000 steps made: the ends of what ai-toolkit's
        example configurations call a good range, with the upper one in steps of our effective
        batch, since it is images that a large set is short of.
        """
        views = max(500, VIEWS_PER_IMAGE * num_images)
        return min(4000, math.ceil(views / self.effective_batch_size))


@dataclass(frozen=True)
class Parts:
    """The models around the transformer: they decide what caching and previews take."""

    text_encoder_parameters: tuple[int, ...] = ()
    """Number of parameters of each text encoder."""
    vae_class: str = ""
    """Class name in diffusers; empty if it is unknown."""
    vae_config: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments of the published autoencoder."""
    decoder_parameters: int = 0
    """Number of parameters of all other models that decode, which are on the device while a
    preview is sampled.
    """


@dataclass(frozen=True)
class PublishedModel:
    """A model of a family, as it is published."""

    hub_id: str
    config: Config
    """Arguments that build its transformer without downloading anything."""
    parts: Parts
    """The other models of its pipeline."""
    name: str = ""
    """What it may be called instead of its hub id; the family's first model is called as the
    family.
    """
    num_parameters: int = 0
    """Number of parameters of the transformer that `config` builds; 0 if it is not stated."""
    license: str = ""
    """License that its card names."""
    source: str = ""
    """Where its size is published, if the transformer that `config` builds was compared with it."""
    note: str = ""
    """What whoever trains it should know."""

    def variant(
        self, hub_id: str, name: str, *, note: str = "", source: str = ""
    ) -> "PublishedModel":
        """Another model of the same architecture and license."""
        return replace(self, hub_id=hub_id, name=name, note=note, source=source)


FLUX_VAE: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""The autoencoder of FLUX.1, which Chroma and Kandinsky 5.0 Image use, too."""
