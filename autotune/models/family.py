"""What a model family must implement, so that everything else can stay ignorant of model names.

A family knows its own pipeline: which layers repeat, how captions and pixels become tensors, how
noise is mixed in and what the denoiser is called with. It knows nothing of devices, memory or
search. To add one: docs/adding-a-family.md.

The model that is trained is called the transformer throughout, though a family's may be a UNet.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from PIL import Image

from autotune.errors import InvalidInput, first_line, suggest_nearest
from autotune.models.noise import FLOW_MATCHING, NoiseProcess
from autotune.plan.job import TimestepSampling, Weighting
from autotune.plan.workload import Bucket, TextPadding, pad_text
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    import diffusers
    import torch
    from torch import Tensor, nn
else:
    diffusers = lazy_module("diffusers")
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

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
    """What the attention's output goes through, if the module has it."""


ADDED_TEXT = Stream(
    "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"
)
"""The text's layers in diffusers' joint attention."""


@dataclass(frozen=True)
class AttentionLayout:
    """What a stock attention processor does before and after attention. Norms are RMSNorms over
    a head."""

    processor: str
    """Class name of the stock processor in diffusers."""
    rotary: Rotary
    rotary_argument: str
    """The argument of the processor that holds rotary positions."""
    image: Stream = Stream()
    text: Stream | None = None
    """Layers of the text, which comes before the image; None if what comes as text is attended
    to, not joined."""
    rounds_to_bf16: bool = False
    """Whether rotated queries and keys are rounded to bf16 whatever the compute dtype."""


Config = Mapping[str, Any]
"""Constructor arguments of a transformer."""

VIEWS_PER_IMAGE = 100
"""Times that an image is seen: 20 images make 2,000 views, the 2,000 steps at batch size 1 of
ai-toolkit's examples."""


@dataclass(frozen=True)
class Defaults:
    """Values that a job of this family uses unless the user sets them; `sources` says where they
    come from."""

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
    is an input of it."""
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
        diffusers."""
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
    preview is sampled."""


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
    family."""
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
    ) -> PublishedModel:
        """Another model of the same architecture and license."""
        return replace(self, hub_id=hub_id, name=name, note=note, source=source)


@dataclass(frozen=True)
class ModulationLayers:
    """Where a transformer turns what an item is conditioned on as a whole (its noise level, a
    pooled prompt, guidance) into the shifts, scales and gates of its blocks (AdaLN; Peebles and
    Xie 2023)."""

    owners: str
    """Regular expression for the names of modules that each have one `SiLU` and one `Linear`:
    the Linear, applied to the activated conditioning, is a modulation layer. Nothing else may
    use the conditioning."""
    embedders: tuple[str, ...]
    """Modules whose outputs (items, features) add up to the conditioning, in the order that they
    are called."""
    inputs: tuple[str, ...] = ()
    """Tensors of a sample that it depends on, besides noise level and guidance."""

    def layer_names(self, owner: str, module: nn.Module) -> tuple[str, str]:
        """Names of the owner's activation and of its modulation layer."""
        kinds = {type(child): f"{owner}.{name}" for name, child in module.named_children()}
        return kinds[nn.SiLU], kinds[nn.Linear]

    def find(self, transformer: nn.Module) -> list[tuple[str, str]]:
        """Names of every activation and its modulation layer."""
        owners = (
            (name, module)
            for name, module in transformer.named_modules()
            if re.fullmatch(self.owners, name)
        )
        return [self.layer_names(name, module) for name, module in owners]


if TYPE_CHECKING:
    Sample: TypeAlias = dict[str, Tensor]
else:
    Sample = Any
"""One training item: `latents` and whatever the transformer is conditioned on, no batch
dimension."""

if TYPE_CHECKING:
    Batch: TypeAlias = dict[str, Tensor]
else:
    Batch = Any
"""Several samples of one shape, with a leading batch dimension."""

Shapes = dict[str, tuple[int, ...]]
"""Shape of every tensor in a sample, by name."""

Sizes = Sequence[tuple[int, int]]
"""(width, height) in px of an item's control images."""


def unwrap_model(transformer: nn.Module) -> Any:
    """The diffusers model itself, whether or not it is wrapped for several processes or compiled
    as a whole."""
    while (
        inner := getattr(transformer, "module", getattr(transformer, "_orig_mod", None))
    ) is not None:
        transformer = inner
    return transformer


@cache
def _instance(family: type[Family]) -> Family:
    """One for all who ask: what was traced for it is remembered with it."""
    return family()


class Family(ABC):
    """One model family. Stateless: instances live in the registry."""

    name: ClassVar[str]
    models: ClassVar[tuple[PublishedModel, ...]]
    """Its published models; the first is meant by the family's name."""
    pipeline_class: ClassVar[str]
    """Class name in diffusers, as in `model_index.json`."""
    pipeline_config: ClassVar[Config] = MappingProxyType({})
    """Values of `model_index.json` that tell families of one pipeline class apart; None is
    absent, null or false."""
    denoiser: ClassVar[str] = "transformer"
    """The pipeline's component, and so the folder, of the model that is trained."""
    transformer_class: ClassVar[str]
    """Class name in diffusers of the model that is trained."""
    noise: ClassVar[NoiseProcess] = FLOW_MATCHING
    """How the published models are noised."""
    obsolete_config: ClassVar[frozenset[str]] = frozenset()
    """Keys of published configurations that the class no longer takes and that never had an
    effect."""
    expert: ClassVar[str | None] = None
    """Which of several transformers for parts of the noise is trained; None if there is one."""
    other_denoisers: ClassVar[tuple[str, ...]] = ()
    """The components that denoise in its place where the noise is not its own."""
    adapter_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of `load_lora_weights` that load an adapter's file into the component that is
    trained."""
    tiny_config: ClassVar[Config]
    """Changes to a configuration that make it tiny but leave its class, head size and every kind
    of block."""
    components: ClassVar[tuple[str, ...]]
    """Folders of a complete pipeline in the diffusers layout."""
    connectors: ClassVar[tuple[str, ...]] = ()
    """Those that `encode_prompt` needs besides text encoders: they are loaded, quantized and
    released with them."""
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    """Those that the pipeline calls after the last step."""
    defaults: ClassVar[Defaults]
    size_multiple_px: ClassVar[int]
    """Width and height must be multiples of this: VAE factor times patch size."""
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]]
    """Named sets of adapted layers, each in the form that peft's `target_modules` takes."""
    block_lists: ClassVar[tuple[str, ...]]
    """Names in `named_modules` of what holds the transformer's repeated blocks, in the order
    they run."""
    modulation: ClassVar[ModulationLayers | None] = None
    """The modulation layers, if they hold a large share of the weights; else `excluded` says why
    it does not pay."""
    excluded: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Knobs that stay at their defaults with this family, and why."""
    fp16_overflow: ClassVar[str] = ""
    """Why its published models are not trained in fp16 unless it is asked for, with who found
    that; empty if nobody has. Text encoders and VAEs never compute in fp16."""
    attention_layouts: ClassVar[tuple[AttentionLayout, ...]] = ()
    """The transformer's attention processors that `norm_rope` can take the place of; if there
    are none, `excluded` says why."""
    patch: ClassVar[int] = 2
    """Latents that one token stands for, along each side."""
    max_text_tokens: ClassVar[int]
    """Maximum length of an encoded caption: the pipeline cuts it there, or the transformer has
    no more positions."""
    max_controls: ClassVar[int] = 0
    """Maximum number of control images of an item; if it is not 0, every item needs at least
    one."""
    separates_prompts: ClassVar[bool] = False
    """Whether the transformer takes each prompt of a batch by itself, at its own length."""
    masks_padding: ClassVar[bool] = False
    """Whether attention gets a mask if the prompts of a batch differ in length."""
    text_multiple: ClassVar[int] = 1
    """Number of tokens of which the transformer itself pads each text to a multiple."""
    max_micro_batch_size: ClassVar[int | None] = None
    """Maximum number of samples in a forward pass; None for any."""
    casts_to_weight_dtype: ClassVar[bool] = False
    """Whether a text encoder casts activations to the dtype of a weight, as T5 does: it would
    take bitsandbytes' packed bytes for numbers, without an error."""
    max_side_px: ClassVar[int] = 8192
    """Maximum side of a picture: as many positions as the transformer knows, and no more than
    anybody trains."""
    frames_per_latent: ClassVar[int] = 1
    """Temporal factor of a video VAE: frames of one latent, after the first frame, which has one
    of its own."""
    max_frames: ClassVar[int] = 1
    """Maximum number of frames of an item."""

    @property
    def transformer_config(self) -> Config:
        """Arguments that build the transformer of the model that is meant by the family's name."""
        return self.models[0].config

    @property
    def parts(self) -> Parts:
        """The other models of its pipeline."""
        return self.models[0].parts

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        """The noise process of a model, by the configuration of its pipeline's scheduler and its
        `model_index.json`."""
        return self.noise

    @property
    def experts(self) -> Mapping[str, type[Family]]:
        """The family as it trains each of them, by the name of the expert."""
        return {}

    def with_expert(self, name: str | None) -> Family:
        """The family as it trains that transformer. Raises InvalidInput if it has none of that
        name."""
        if name is None:
            return self
        if name not in self.experts:
            known = (
                f"use --expert {' or '.join(self.experts)}"
                if self.experts
                else "leave --expert out"
            )
            raise InvalidInput(f"{self.name} has no {name} expert", hint=known)
        return self if name == self.expert else _instance(self.experts[name])

    @property
    def adapter_component(self) -> str:
        """What an adapter's file names its layers by."""
        return self.denoiser

    def is_pipeline(self, index: Mapping[str, Any]) -> bool:
        """Whether a `model_index.json` is that of this family's pipelines."""
        expected = {"_class_name": self.pipeline_class, **self.pipeline_config}
        return all((index.get(key) or None) == value for key, value in expected.items())

    @property
    def can_train_clips(self) -> bool:
        """Whether an item may have several frames."""
        return self.max_frames > 1

    @property
    def kind(self) -> Literal["image", "edit", "video"]:
        """What its models make: images, images from others, or clips as well."""
        if self.max_controls:
            return "edit"
        return "video" if self.can_train_clips else "image"

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The components that encode captions."""
        return (
            *(name for name in self.components if name.startswith("text_encoder")),
            *self.connectors,
        )

    def num_latent_frames(self, num_frames: int) -> int:
        """Frames of the latents that so many frames make."""
        return (num_frames - 1) // self.frames_per_latent + 1

    def tokens_per_frame(self, bucket: Bucket) -> int:
        """Tokens that the transformer makes of one frame: one for each square of
        `size_multiple_px`."""
        return bucket.width_px * bucket.height_px // self.size_multiple_px**2

    def build_transformer(self, config: Config) -> nn.Module:
        """Build the transformer with random weights, on torch's current default device and
        dtype."""
        cls = getattr(diffusers, self.transformer_class)
        known = {
            k: v
            for k, v in config.items()
            if not k.startswith("_") and k not in self.obsolete_config
        }
        model: nn.Module = cls(**known)
        return model

    def find_block_lists(self, transformer: nn.Module) -> dict[str, list[nn.Module]]:
        """Blocks by the name of what holds them, a list or a single block, in the order they
        run. Each can be checkpointed. Those of one list whose weights have the same names and
        shapes compute alike."""
        parts = {name: transformer.get_submodule(name) for name in self.block_lists}
        return {
            name: list(part) if isinstance(part, nn.ModuleList) else [part]
            for name, part in parts.items()
        }

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """All blocks, in the order they run."""
        return [block for blocks in self.find_block_lists(transformer).values() for block in blocks]

    def last_block(self, transformer: nn.Module) -> str:
        """Name in `named_modules` of the block that runs last.

        Double-stream models make nothing of the text that comes out of it, so some of its layers
        never get a gradient.
        """
        last = self.blocks(transformer)[-1]
        return next(str(name) for name, module in transformer.named_modules() if module is last)

    def target_set(self, name: str) -> Sequence[str] | str:
        """The set of adapted layers with that name. Raises InvalidInput if there is none."""
        if name not in self.target_sets:
            hint = suggest_nearest(name, self.target_sets)
            raise InvalidInput(f"{self.name} has no target set called {name!r}", hint=hint)
        return self.target_sets[name]

    def shift_at(self, shape: Sequence[int]) -> float:
        """The timestep shift for latents of `shape` (channels, frames, height, width), if the
        family has one."""
        return self.defaults.shift_at(math.prod(shape[1:]) // self.patch**2)

    def check_num_frames(self, number: int) -> None:
        """Raise InvalidInput if an item cannot have that many frames."""
        if number > self.max_frames:
            makes = (
                f"takes up to {self.max_frames} frames" if self.can_train_clips else "makes images"
            )
            hint = (
                f"use --frames {self.max_frames}; in a plan's job, num_frames is {self.max_frames}"
            )
            raise InvalidInput(f"{self.name} {makes}, not a clip of {number}", hint=hint)
        below = (number - 1) // self.frames_per_latent * self.frames_per_latent + 1
        if number != below:
            above = min(below + self.frames_per_latent, self.max_frames)
            raise InvalidInput(
                f"{number} frames do not suit {self.name}: its VAE makes a latent of the first "
                "frame and of each "
                f"{self.frames_per_latent} that follow",
                hint=f"use --frames {below} or --frames {above}",
            )

    def check_num_controls(self, number: int, of: str) -> None:
        """Raise InvalidInput if `of`, an item or a prompt, cannot have that many control images."""
        allowed = f"1 to {self.max_controls}" if self.max_controls else "none"
        if not min(1, self.max_controls) <= number <= self.max_controls:
            leave_out = "leave --control out, or use a model for editing (of a single file: --base)"
            hint = (
                "give the images that belong to each with --control"
                if self.max_controls
                else leave_out
            )
            raise InvalidInput(
                f"{of} has {number} control image(s); {self.name} takes {allowed}", hint=hint
            )

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        """Load the pipeline in `folder` with the stock class; `components` go to its
        `from_pretrained`."""
        pipeline = getattr(diffusers, self.pipeline_class).from_pretrained(folder, **components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @abstractmethod
    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        """Shape of every tensor in a sample of this bucket, for a transformer of this
        configuration.

        `num_controls` counts the control images of an item; families without them ignore it.
        """

    @abstractmethod
    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        """Encode what the transformer is conditioned on: the caption at its own length, in the
        pipeline's template.

        It has no padding, so what is cached is exact and needs no mask.

        `controls` are the pixels of its control images, each (3, 1, height, width) in [-1, 1]: what
        they show is part of the prompt. Families without control images ignore them.
        """

    @abstractmethod
    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        """Length of each encoded caption, from the tokenizer in the model's `folder` alone: no
        encoder is loaded.

        `controls` holds for each caption the sizes of its control images.
        """

    @abstractmethod
    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        """Latents (channels, frames, height, width), normalized, of pixels (3, frames, height,
        width) in [-1, 1]."""

    def decodable(self, latents: Tensor) -> Tensor:
        """Latents (batch, channels, frames, height, width) in the shape that the autoencoder
        decodes."""
        return latents

    def collate(self, samples: Sequence[Sample], token_multiple: int = 1) -> Batch:
        """Stack every tensor; prompts are padded with zeros at the end to the longest, and if their
        lengths differ and attention gets a mask until they and the images are a multiple of
        `token_multiple` tokens.

        If prompts differ in length, `prompt_mask` (batch, padded) is True on their own tokens. With
        `separates_prompts` they stay as they are, in `prompt_embeds_0`, `prompt_embeds_1` and so
        on.

        Raises RuntimeError if other tensors differ in shape: the samples are not of one bucket.
        """
        others = [name for name in samples[0] if name != "prompt_embeds"]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in others}
        prompts = [sample["prompt_embeds"] for sample in samples]
        if self.separates_prompts:
            return {
                **batch,
                **{f"prompt_embeds_{number}": prompt for number, prompt in enumerate(prompts)},
            }
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        if min(lengths) < longest and self.has_attention_mask(len(samples), "masked"):
            latents = (tensor for name, tensor in samples[0].items() if "latents" in name)
            image_tokens = sum(math.prod(each.shape[1:]) // self.patch**2 for each in latents)
            longest = pad_text(longest, image_tokens, token_multiple)
        padded = prompts[0].new_zeros(len(prompts), longest, *prompts[0].shape[1:])
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        batch["prompt_embeds"] = padded
        if min(lengths) < longest:
            positions = torch.arange(longest, device=padded.device)
            batch["prompt_mask"] = (
                positions < torch.tensor(lengths, device=positions.device)[:, None]
            )
        return batch

    @abstractmethod
    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
        """What the model predicts, in the shape of `noisy` (batch, channels, frames, height,
        width).

        `levels` (batch,) are the noise process's, of fp32. A `guidance` (batch,) in `batch` takes
        the place of the default's.
        """

    def guidance_input(self, transformer: nn.Module, levels: Tensor, batch: Batch) -> Tensor | None:
        """Guidance (batch,) for a transformer that takes it as an input: the batch's, or the
        default's."""
        default = levels.new_full(levels.shape, self.defaults.training_guidance or 1.0)
        return (
            batch.get("guidance", default)
            if unwrap_model(transformer).config.guidance_embeds
            else None
        )

    def sample(
        self,
        pipeline: Any,
        prompt: str,
        bucket: Bucket,
        *,
        num_steps: int,
        seed: int,
        controls: Sequence[Image.Image] = (),
    ) -> list[Image.Image]:
        """Sample the frames of an image or a clip in the shape of `bucket`, by the pipeline's own
        loop.

        Args:
            pipeline: a whole pipeline, with or without an adapter.
            prompt: what to show.
            bucket: width, height and frames; each must suit the family.
            num_steps: denoising steps; at least 2, since with one the schedule of Qwen-Image
                divides by zero.
            seed: seed of the noise, drawn on the CPU: the same picture on every device.
            controls: control images, if the family takes them.
        """
        with torch.no_grad():
            images = pipeline(
                width=bucket.width_px,
                height=bucket.height_px,
                num_inference_steps=num_steps,
                generator=torch.Generator().manual_seed(seed),
                return_dict=False,
                **self.sampling_arguments(pipeline, prompt, bucket, controls),
            )[0]
        frames = images[0] if isinstance(images[0], list) else [images[0]]
        return [
            frame.convert("RGB") for frame in frames
        ]  # some are RGBA; what they learn from is opaque

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence[Image.Image]
    ) -> dict[str, Any]:
        """Further arguments of the pipeline's call to sample: prompt, guidance, control images,
        frames."""
        return {"prompt": prompt, "guidance_scale": self.defaults.sampling_guidance}

    def has_attention_mask(self, micro_batch_size: int, text_padding: TextPadding) -> bool:
        """Whether attention gets a mask at this batch size, which some backends refuse."""
        return self.masks_padding and micro_batch_size > 1 and text_padding == "masked"


CHECK_CONFIG = "check the config.json of what is trained, or update diffusers"


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, without what diffusers notes about itself."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def build_on_meta(family: Family, config: Mapping[str, Any]) -> Any:
    """Build the transformer with all parameters and buffers on the meta device.

    Raises InvalidInput if the class refuses the configuration.
    """
    from diffusers.models.modeling_utils import no_init_weights

    from autotune.weights.stream import limit_tensors

    getattr(
        diffusers, family.transformer_class
    )  # an error of this import would not be the configuration's
    try:
        with torch.device("meta"), limit_tensors(), no_init_weights():
            return family.build_transformer(config)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        raise InvalidInput(
            f"the transformer's configuration does not build a {family.transformer_class}: "
            f"{reason}",
            hint=CHECK_CONFIG,
        ) from error


def denoising_loss(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess | None = None,
    weighting: Weighting = "none",
) -> Tensor:
    """Mean squared error of the prediction, averaged in fp32 over a micro-batch.

    Args:
        family: predicts by the model.
        transformer: the model that it calls.
        batch: collated samples; `latents` (batch, channels, frames, height, width) and the
            conditioning. If any has a mask or a weight also `loss_weights` (batch, 1, 1, height,
            width), factors of the squared error.
        noise: standard normal, in the shape of the latents.
        levels: (batch,) of noise, as `process` counts them.
        process: the model's, by default the family's.
        weighting: how images weigh by their noise; one of the process's.
    """
    process, clean = process or family.noise, batch["latents"]
    if weighting != "none" or "loss_weights" in batch:
        return image_losses(family, transformer, batch, noise, levels, process, weighting).mean()
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    return nn.functional.mse_loss(predicted.float(), process.target(clean, noise, levels).float())


def image_losses(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess,
    weighting: Weighting,
) -> Tensor:
    """The loss of each image of the micro-batch, (batch,): their mean is `denoising_loss`, up to
    rounding."""
    clean = batch["latents"]
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    errors = (predicted.float() - process.target(clean, noise, levels).float()).square()
    if "loss_weights" in batch:
        errors = errors * batch["loss_weights"].float()
    errors = errors.flatten(1).mean(dim=1)
    return errors if weighting == "none" else process.weights(levels, weighting) * errors
