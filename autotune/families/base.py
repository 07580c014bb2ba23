"""What a model family must answer, so that everything else can stay ignorant of model names.

A family knows its own pipeline: which layers repeat, how captions and pixels become tensors, what the transformer is
called with. It knows nothing of devices, memory or search. Adding one is one file and one line in the registry.

Every family here is trained by flow matching: noisy = (1 - sigma) * clean + sigma * noise, and the transformer
predicts the velocity noise - clean.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autotune.schema import Bucket

if TYPE_CHECKING:
    from torch import Tensor, nn

Sample = dict[str, "Tensor"]
"""One training item: `latents` and whatever the transformer is conditioned on, no batch dimension."""

Batch = dict[str, "Tensor"]
"""Several samples of one shape, with a leading batch dimension."""


@dataclass(frozen=True)
class Defaults:
    """What a job of this family uses when the user says nothing. Sources stand beside each family's values."""

    rank: int
    lora_alpha: float
    learning_rate: float
    weight_decay: float
    effective_batch_size: int
    resolution_px: int
    text_tokens: int
    """Assumed length of an encoded caption where no data is at hand."""
    timestep_shift: float
    preview_steps: int


class Family(ABC):
    """One model family. Stateless: instances live in the registry."""

    name: ClassVar[str]
    hub_id: ClassVar[str]
    pipeline_class: ClassVar[str]
    """Class name in diffusers, as `model_index.json` says it."""
    transformer_class: ClassVar[str]
    transformer_config: ClassVar[Mapping[str, Any]]
    """Constructor arguments that give the published model; enough to build it without downloading anything."""
    components: ClassVar[tuple[str, ...]]
    """Folders that a complete pipeline has, in the diffusers layout."""
    defaults: ClassVar[Defaults]
    size_multiple_px: ClassVar[int]
    """Width and height must be multiples of this: VAE factor times patch size."""
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]]
    """Named sets of adapted layers, each in the form that peft's `target_modules` takes."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes of the transformer that hold its repeated blocks, in the order they run."""

    def build_transformer(self, config: Mapping[str, Any]) -> "nn.Module":
        """The transformer with random weights, on torch's current default device and dtype."""
        import diffusers

        cls = getattr(diffusers, self.transformer_class)
        model: nn.Module = cls(**{key: value for key, value in config.items() if not key.startswith("_")})
        return model

    def blocks(self, transformer: "nn.Module") -> list["nn.Module"]:
        """The repeated blocks that can be checkpointed, in the order they run."""
        return [block for name in self.block_lists for block in getattr(transformer, name)]

    @abstractmethod
    def sample_shapes(self, config: Mapping[str, Any], bucket: Bucket, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in a sample of this bucket, for a transformer of this configuration."""

    @abstractmethod
    def encode_captions(self, pipeline: Any, captions: Sequence[str]) -> list[Sample]:
        """Encode each caption at its own length with the pipeline's own template."""

    @abstractmethod
    def count_text_tokens(self, folder: Path, captions: Sequence[str]) -> list[int]:
        """Length of each encoded caption, from the tokenizer in the model's `folder` alone: no encoder is loaded."""

    @abstractmethod
    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        """Latents (channels, frames, height, width), normalised, of pixels (3, frames, height, width) in [-1, 1]."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack samples of one bucket; pad captions and add a mask only where their lengths differ."""

    @abstractmethod
    def predict(self, transformer: "nn.Module", noisy: "Tensor", sigmas: "Tensor", batch: Batch) -> "Tensor":
        """The predicted velocity, in the shape of `noisy` (batch, channels, frames, height, width).

        `sigmas` (batch,) in [0, 1] is the share of noise.
        """

    @abstractmethod
    def masks(self, micro_batch_size: int, text_padding: Literal["exact", "masked"]) -> bool:
        """Whether attention gets a mask at this batch size: some backends refuse any."""

    @abstractmethod
    def write_small_pipeline(self, folder: Path, captions: Sequence[str], seed: int) -> None:
        """Write a small genuine pipeline with random weights in the diffusers layout: for demos and tests."""
