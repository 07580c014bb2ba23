"""The questions that a model family must answer, so that nothing else knows models by name. To add
one: docs/adding-a-family.md.

A family knows its own pipeline, and nothing of devices, memory or search. The model that is trained
is called the transformer throughout, though a family's may be a UNet.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from PIL import Image

from autotune.errors import InvalidInput, first_line, suggest_nearest
from autotune.models import facts
from autotune.models.latents import CONTROL
from autotune.models.noise import FLOW_MATCHING, NoiseProcess
from autotune.plan.job import Weighting
from autotune.plan.workload import Bucket, TextPadding, pad_text
from autotune.system.lazy import Tensor, diffusers, nn, torch

Sample: TypeAlias = dict[str, Tensor]  # `latents` and conditioning of an item, without a batch
Batch: TypeAlias = dict[str, Tensor]  # several samples of one shape, with a leading batch dimension
Shapes: TypeAlias = dict[str, tuple[int, ...]]  # shape of every tensor in a sample, by name
Pixels: TypeAlias = Sequence[Tensor]  # of control images, (3, 1, height, width) in [-1, 1]
Sizes: TypeAlias = Sequence[Sequence[tuple[int, int]]]  # (width, height) of control images by item
Texts: TypeAlias = Sequence[str]
Images: TypeAlias = Sequence[Image.Image]
Options: TypeAlias = dict[str, Any]

PRIOR = "prior"  # in a sample whose target is the base's prediction, and then that prediction
PLACES = "image_places"  # in a sample, of control images among its text; the host reads them
DOWN = "down"  # in a sample from which a slider learns at strength -1
COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")  # of most pipelines


class Family(ABC):
    """One model family. Stateless: instances live in the registry."""

    name: ClassVar[str]
    models: ClassVar[tuple[facts.PublishedModel, ...]]  # the first is meant by the family's name
    defaults: ClassVar[facts.Defaults]
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of its models, which families may share
    fine_tunes: ClassVar[tuple[str, ...]] = ()  # well-known ones, which come as files

    # The pipeline.
    pipeline_class: ClassVar[str]  # class name in diffusers, as in `model_index.json`
    # Values of `model_index.json` that tell families of one class apart; None: absent or false.
    pipeline_config: ClassVar[facts.Config] = {}
    components: ClassVar[tuple[str, ...]] = COMPONENTS  # folders of a complete pipeline
    connectors: ClassVar[tuple[str, ...]] = ()  # `encode_prompt` needs them as text encoders
    decoders: ClassVar[tuple[str, ...]] = ("vae",)  # which follow the last step
    noise: ClassVar[NoiseProcess] = FLOW_MATCHING  # how the published models are noised

    # The model that is trained.
    denoiser: ClassVar[str] = "transformer"  # its component of the pipeline, and so its folder
    transformer_class: ClassVar[str]  # class name in diffusers
    # Keys of published configurations that the class no longer takes, and that had no effect.
    obsolete_config: ClassVar[frozenset[str]] = frozenset()
    tiny_config: ClassVar[facts.Config]  # leaves its head size and every kind of block
    # The family as it trains each of several transformers for parts of the noise, by name.
    experts: ClassVar[Mapping[str, Family]] = {}
    expert: ClassVar[str | None] = None  # which of them is trained; None if there is one
    other_denoisers: ClassVar[tuple[str, ...]] = ()  # those for the other parts of the noise
    untrained_files: ClassVar[str] = ""  # pattern in names of files of one that is not trained
    # Of `load_lora_weights`, for the one that is trained.
    adapter_options: ClassVar[facts.Config] = {}

    # Its layers.
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]]  # as peft's `target_modules`, by name
    # Names in `named_modules` of what holds the repeated blocks, in the order they run.
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    # If it holds a large share of the weights.
    modulation: ClassVar[facts.ModulationLayers | None] = None
    attention_layouts: ClassVar[tuple[facts.AttentionLayout, ...]] = ()  # that `norm_rope` knows
    excluded: ClassVar[Mapping[str, str]] = {}  # knobs that stay at their defaults, and why
    # Why its models are not trained in fp16 unless it is asked for, with who found that. Text
    # encoders and VAEs never compute in fp16.
    fp16_overflow: ClassVar[str] = ""

    # Pictures and clips.
    latent_px: ClassVar[int] = 8  # pixels per latent, along each side
    patch: ClassVar[int] = 2  # latents that one token stands for, along each side
    size_multiple_px: ClassVar[int] = 16  # VAE factor times patch size, along each side
    max_side_px: ClassVar[int] = 8192  # as the transformer's positions, and as anybody trains
    frames_per_latent: ClassVar[int] = 1  # the first frame has a latent of its own
    max_frames: ClassVar[int] = 1
    min_controls: ClassVar[int] = 0  # control images of an item
    max_controls: ClassVar[int] = 0
    # Previews are given the first frame; in training it is the item's own.
    starts_from_picture: ClassVar[bool] = False
    # Constructor argument of the transformer that counts the channels of latents, and its default
    # there; so for the other sizes.
    latent_channels: ClassVar[tuple[str, int]] = ("in_channels", 16)
    counts_packed: ClassVar[bool] = False  # that argument counts the channels of a whole patch

    # Captions.
    max_text_tokens: ClassVar[int]  # at which the pipeline cuts captions, or positions end
    # The tokenizer of the text encoder that reads most of a caption, and how much, if not so many.
    caption_tokenizer = "tokenizer"
    max_caption_tokens: ClassVar[int | None] = None
    # Arguments for the size of one token of an encoded caption.
    prompt_size: ClassVar[tuple[tuple[str, int], ...]] = (("joint_attention_dim", 4096),)
    pooled_size: ClassVar[tuple[str, int] | None] = None
    pooled_output: ClassVar[int] = 1  # place of the pooled prompt in what `encode_prompt` returns
    encode_options: ClassVar[facts.Config] = {}  # arguments of `encode_prompt` besides the prompt
    separates_prompts: ClassVar[bool] = False  # each prompt of a batch keeps its own length
    masks_padding: ClassVar[bool] = False  # if the prompts of a batch differ in length
    text_multiple: ClassVar[int] = 1  # to which the transformer itself pads each text
    max_micro_batch_size: ClassVar[int | None] = None  # None for any
    # A text encoder casts activations to the dtype of a weight, as T5 does: it would take
    # bitsandbytes' packed bytes for numbers, without an error.
    casts_to_weight_dtype: ClassVar[bool] = False

    @property
    def transformer_config(self) -> facts.Config:
        return self.models[0].config

    @property
    def parts(self) -> facts.Parts:
        return self.models[0].parts

    @property
    def adapter_component(self) -> str:
        """The name that an adapter's file gives the component of its layers."""
        return self.denoiser

    @property
    def can_train_clips(self) -> bool:
        return self.max_frames > 1

    @property
    def kind(self) -> Literal["image", "edit", "video"]:
        if self.min_controls:
            return "edit"
        return "video" if self.can_train_clips else "image"

    @property
    def text_encoders(self) -> tuple[str, ...]:
        encoders = (name for name in self.components if name.startswith("text_encoder"))
        return (*encoders, *self.connectors)

    def with_expert(self, name: str | None) -> Family:
        """Return the family as it trains that transformer, else raise InvalidInput."""
        if name is None or name == self.expert:
            return self
        if name not in self.experts:
            use = f"use --expert {' or '.join(self.experts)}"
            hint = use if self.experts else "leave --expert out"
            raise InvalidInput(f"{self.name} has no {name} expert", hint=hint)
        return self.experts[name]

    def is_pipeline(self, index: facts.Config) -> bool:
        """Tell if a `model_index.json` is that of this family's pipelines."""
        expected = {"_class_name": self.pipeline_class, **self.pipeline_config}
        return all((index.get(key) or None) == value for key, value in expected.items())

    def noise_of(self, scheduler: facts.Config, index: facts.Config) -> NoiseProcess:
        """Return a model's noise process, by its scheduler and its `model_index.json`."""
        return self.noise

    def build_transformer(self, config: facts.Config) -> nn.Module:
        """Build the transformer with random weights, on torch's default device and dtype."""
        known = {k: v for k, v in public_config(config).items() if k not in self.obsolete_config}
        model: nn.Module = getattr(diffusers, self.transformer_class)(**known)
        return model

    def find_block_lists(self, transformer: nn.Module) -> dict[str, list[nn.Module]]:
        """Find blocks by the name of what holds them, in the order they run."""
        parts = {name: transformer.get_submodule(name) for name in self.block_lists}
        return {
            name: list(part) if isinstance(part, nn.ModuleList) else [part]
            for name, part in parts.items()
        }

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        return [block for blocks in self.find_block_lists(transformer).values() for block in blocks]

    def last_block(self, transformer: nn.Module) -> str:
        """Name the block that runs last: some of its layers may never get a gradient."""
        last = self.blocks(transformer)[-1]
        return next(str(name) for name, module in transformer.named_modules() if module is last)

    def target_set(self, name: str) -> Sequence[str] | str:
        if name not in self.target_sets:
            hint = suggest_nearest(name, self.target_sets)
            raise InvalidInput(f"{self.name} has no target set called {name!r}", hint=hint)
        return self.target_sets[name]

    def num_latent_frames(self, num_frames: int) -> int:
        """Count the latent frames that this many frames make."""
        return (num_frames - 1) // self.frames_per_latent + 1

    def whole_frames(self, num_frames: int) -> int:
        """Count how many of these frames go into latents."""
        return (self.num_latent_frames(num_frames) - 1) * self.frames_per_latent + 1

    def tokens_per_frame(self, bucket: Bucket) -> int:
        """Count the transformer's tokens of one frame, each a square of `size_multiple_px`."""
        return bucket.width_px * bucket.height_px // self.size_multiple_px**2

    def shift_at(self, shape: Sequence[int]) -> float:
        """Compute the timestep shift for latents of (channels, frames, height, width)."""
        return self.defaults.shift_at(math.prod(shape[1:]) // self.patch**2)

    def check_num_frames(self, number: int) -> None:
        """Raise InvalidInput if an item cannot have that many frames."""
        if number > self.max_frames:
            most = self.max_frames
            makes = f"takes up to {most} frames" if self.can_train_clips else "makes images"
            hint = f"use --frames {most}; in a plan's job, num_frames is {most}"
            raise InvalidInput(f"{self.name} {makes}, not a clip of {number}", hint=hint)
        below = self.whole_frames(number)
        if number != below:
            above = next(n for n in count(number) if self.whole_frames(n) == n)
            raise InvalidInput(
                f"{number} frames do not suit {self.name}: its VAE makes whole latents of "
                f"{below} or {above}",
                hint=f"use --frames {below} or --frames {above}",
            )

    def check_num_controls(self, number: int, of: str) -> None:
        """Raise InvalidInput if `of`, an item or a prompt, cannot have that many control images."""
        if self.min_controls <= number <= self.max_controls:
            return
        allowed = "none"
        hint = "leave --control out, or use a model for editing (of a single file: --base)"
        if self.max_controls:
            allowed = " to ".join(map(str, sorted({self.min_controls, self.max_controls})))
            hint = "give the images that belong to each with --control"
        what = f"{of} has {number} control image(s); {self.name} takes {allowed}"
        raise InvalidInput(what, hint=hint)

    def check_prompt(self, num_pictures: int) -> None:
        """Raise InvalidInput if a prompt cannot come with that many pictures."""
        if not self.starts_from_picture:
            self.check_num_controls(num_pictures, "the prompt")
        elif num_pictures != 1:
            message = f"{self.name} makes a clip of one picture, not of {num_pictures}"
            raise InvalidInput(message, hint="name its first frame with --control")

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        """Load the pipeline in `folder` with the stock class."""
        pipeline = getattr(diffusers, self.pipeline_class).from_pretrained(folder, **components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def loading_code(self, base: str) -> list[str]:
        """Return the lines of Python that load the stock pipeline of `base`, an expression."""
        kind = "DiffusionPipeline"
        return [f"from diffusers import {kind}", "", f"pipeline = {kind}.from_pretrained({base})"]

    def adapter_code(self, kind: str, source: str, file: str) -> str:
        """Return the line of Python that loads a file of an adapter of this kind into it."""
        how, options = "load_lora_weights", self.adapter_options
        if kind == "lokr":  # which few pipelines load
            how, options = f"{self.denoiser}.load_lora_adapter", {"prefix": self.adapter_component}
        named = (f"{key}={value!r}" for key, value in {"weight_name": file, **options}.items())
        return f'pipeline.{how}("{source}", {", ".join(named)})'

    def sample_shapes(
        self, config: facts.Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        """Return the shape of every tensor in a sample of this bucket, for a transformer of this
        configuration; families without control images ignore `num_controls`."""
        channels = config.get(*self.latent_channels)
        latents = (
            channels // self.patch**2 if self.counts_packed else channels,
            self.num_latent_frames(bucket.num_frames),
            bucket.height_px // self.latent_px,
            bucket.width_px // self.latent_px,
        )
        controls = range(1, min(num_controls, self.max_controls) + 1)
        shapes: Shapes = {
            "latents": latents,
            **{f"{CONTROL}{number}": latents for number in controls},
            "prompt_embeds": (text_tokens, *(config.get(*size) for size in self.prompt_size)),
        }
        if self.pooled_size:
            shapes["pooled_prompt_embeds"] = (config.get(*self.pooled_size),)
        return shapes

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        """Encode what the transformer is conditioned on: the caption in the pipeline's template,
        and what its control images show; without padding, so that it needs no mask."""
        encoded = pipeline.encode_prompt(prompt=[caption], **self.encode_options)
        sample = {"prompt_embeds": encoded[0][0]}
        if self.pooled_size:
            sample["pooled_prompt_embeds"] = encoded[self.pooled_output][0]
        return sample

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        """Count the tokens of each encoded caption, with the tokenizer in the model's `folder`."""
        return [self.max_text_tokens] * len(captions)

    def encode_item(self, pipeline: Any, pixels: Tensor) -> Sample:
        """Encode pixels to all that the transformer sees of them; see `encode_pixels`."""
        return {"latents": self.encode_pixels(pipeline, pixels)}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        """Encode pixels (3, frames, height, width) in [-1, 1] to latents (channels, frames, height,
        width), normalized by the mean and deviation that a VAE for video states."""
        vae = pipeline.vae
        mean = pixels.new_tensor(vae.config.latents_mean).view(-1, 1, 1, 1)
        std = pixels.new_tensor(vae.config.latents_std).view(-1, 1, 1, 1)
        latents: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0]
        return (latents.to(pixels.dtype) - mean) / std

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        """Return latents (batch, channels, frames, height, width) as the VAE decodes them."""
        return latents

    def collate(self, samples: Sequence[Sample], token_multiple: int = 1) -> Batch:
        """Stack the samples of one bucket.

        Prompts are padded with zeros at the end to the longest, and if their lengths differ and
        attention gets a mask until they and the images are a multiple of `token_multiple` tokens;
        then `prompt_mask` (batch, padded) is True on their own tokens. With `separates_prompts`
        they stay as they are, in `prompt_embeds_0`, `prompt_embeds_1` and so on.
        """
        others = [name for name in samples[0] if name != "prompt_embeds"]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in others}
        prompts = [sample["prompt_embeds"] for sample in samples]
        if self.separates_prompts:
            separate = {f"prompt_embeds_{number}": prompt for number, prompt in enumerate(prompts)}
            return batch | separate
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
            ends = torch.tensor(lengths, device=positions.device)[:, None]
            batch["prompt_mask"] = positions < ends
        return batch

    @abstractmethod
    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        """Call the transformer; returns what it predicts, in the shape of `noisy` (batch, channels,
        frames, height, width). `levels` (batch,) are the noise process's, of fp32."""

    def guidance_input(self, transformer: Any, levels: Tensor, batch: Batch) -> Tensor | None:
        """Return the guidance (batch,) for a transformer that takes it as an input."""
        if not unwrap_model(transformer).config.guidance_embeds:
            return None
        default = levels.new_full(levels.shape, self.defaults.training_guidance or 1.0)
        return batch.get("guidance", default)

    def sample(
        self,
        pipeline: Any,
        prompt: str,
        bucket: Bucket,
        *,
        num_steps: int,
        seed: int,
        controls: Images = (),
    ) -> list[Image.Image]:
        """Sample the frames of an image or a clip in the shape of `bucket`, which must suit the
        family, by the pipeline's own loop.

        `num_steps` is at least 2, since with one the schedule of Qwen-Image divides by zero. Noise
        is drawn on the CPU: the same picture on every device.
        """
        with torch.no_grad(), self.while_sampling(pipeline, bucket):
            images = pipeline(
                width=bucket.width_px,
                height=bucket.height_px,
                num_inference_steps=num_steps,
                generator=torch.Generator().manual_seed(seed),
                output_type="pil",
                return_dict=False,
                **self.call_options(pipeline, prompt, bucket, controls),
            )[0]
        frames = images[0] if isinstance(images[0], list) else [images[0]]
        # Some are RGBA; what they learn from is opaque.
        return [frame.convert("RGB") for frame in frames]

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        """Return the arguments of the pipeline's call that say what to sample."""
        options = {"prompt": prompt, "guidance_scale": self.defaults.sampling_guidance}
        if self.can_train_clips:
            options["num_frames"] = self.whole_frames(bucket.num_frames)
        return options

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        """Change the pipeline, or its module, while it samples."""
        return nullcontext()

    def has_attention_mask(self, micro_batch_size: int, text_padding: TextPadding) -> bool:
        """Tell if attention gets a mask at this batch size, which some backends refuse."""
        return self.masks_padding and micro_batch_size > 1 and text_padding == "masked"


def unwrap_model(transformer: nn.Module) -> Any:
    """Return the diffusers model itself, without what wraps or compiles it."""
    inner = getattr(transformer, "module", getattr(transformer, "_orig_mod", None))
    return transformer if inner is None else unwrap_model(inner)


CHECK_CONFIG = "check the config.json of what is trained, or update diffusers"


def public_config(config: facts.Config) -> dict[str, Any]:
    """Return the arguments of a constructor, without what diffusers notes about itself."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


# Held by what changes functions, hooks, modules or the default dtype for all threads (tracing,
# building and loading models), and by what such a change would falsify: a run's steps, pictures.
TORCH_LOCK = threading.RLock()


def build_on_meta(family: Family, config: facts.Config) -> Any:
    """Build the transformer on the meta device. Raises InvalidInput if its class refuses."""
    from diffusers.models.modeling_utils import no_init_weights

    from autotune.weights.empty import limit_tensors

    kind = family.transformer_class
    getattr(diffusers, kind)  # an error of this import would not be the configuration's
    try:
        with TORCH_LOCK, torch.device("meta"), limit_tensors(), no_init_weights():
            return family.build_transformer(config)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        what = f"the transformer's configuration does not build a {kind}: {first_line(error)}"
        raise InvalidInput(what, hint=CHECK_CONFIG) from error


def denoising_loss(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess | None = None,
    weighting: Weighting = "none",
) -> Tensor:
    """Compute the mean squared error of the prediction, averaged in fp32 over a micro-batch.

    `batch` has `latents` (batch, channels, frames, height, width), the conditioning, and if any
    sample has a mask or a weight `loss_weights` (batch, 1, 1, height, width), factors of the
    squared error; `prior`, if it is there, is what is to be predicted. `levels` (batch,) are as
    `process` counts them, by default the family's.
    """
    process, clean = process or family.noise, batch["latents"]
    if weighting != "none" or "loss_weights" in batch:
        return image_losses(family, transformer, batch, noise, levels, process, weighting).mean()
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    target = process.target(clean, noise, levels) if PRIOR not in batch else batch[PRIOR]
    return nn.functional.mse_loss(predicted.float(), target.float())


def image_losses(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    noise: Tensor,
    levels: Tensor,
    process: NoiseProcess,
    weighting: Weighting,
) -> Tensor:
    """Compute the loss of each image, (batch,), whose mean is `denoising_loss`."""
    clean = batch["latents"]
    noisy = process.add_noise(clean, noise, levels)
    predicted = family.predict(transformer, noisy, levels, batch)
    target = process.target(clean, noise, levels) if PRIOR not in batch else batch[PRIOR]
    errors = (predicted.float() - target.float()).square()
    if "loss_weights" in batch:
        errors = errors * batch["loss_weights"].float()
    errors = errors.flatten(1).mean(dim=1)
    return errors if weighting == "none" else process.weights(levels, weighting) * errors
