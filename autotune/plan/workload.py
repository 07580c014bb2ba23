"""The work of a training run, as far as it decides memory and speed."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from autotune.errors import InvalidInput
from autotune.plan import base

Quality = Literal["exact", "high", "compact"]
Objective = Literal["throughput", "memory"]  # the goal of a search: time or step memory
GOALS: Mapping[Objective, str] = {"throughput": "fastest", "memory": "smallest"}
"""Word for the winner by each, among the settings that run."""
BLOCK_RANGES = r"^(all|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)$"
AdapterKind = Literal["lora", "rslora", "dora", "lokr"]
TextPadding = Literal["exact", "masked"]
"""`exact`: all captions have one length, no mask is ever needed; `masked`: lengths differ."""
SLIDER_PROMPTS = 3  # positive, negative and neutral
PositiveTokens = Annotated[int, base.PositiveInt]
OptionValue = bool | int | float | str | tuple[float, ...]


class OptimizerChoice(base.Frozen):
    """The optimizer that the user wants: it decides what is learned, so none is searched."""

    name: str = Field(
        default="adamw",
        pattern=r"^([a-z0-9]+(-[a-z0-9]+)*|[A-Za-z_][\w.]{0,99}:[A-Za-z_]\w{0,99})$",
    )
    """A name from the table in `autotune.knobs.settings`, or `package:Class`, which is loaded
    only if the user names it again where the plan is used."""
    options: tuple[tuple[str, OptionValue], ...] = Field(default=(), max_length=32)
    """(name, value) pairs: its keyword arguments."""

    @classmethod
    def checked(cls, name: str, options: tuple[tuple[str, OptionValue], ...]) -> Self:
        """Return the optimizer. Raises InvalidInput if it has no such name or option."""
        try:
            return cls(name=name, options=options)
        except ValidationError as error:
            first = error.errors()[0]
            is_name = first["loc"] == ("name",)
            why = "neither a name nor package:Class" if is_name else base.told(first)
            what = f"{name!r} is not an optimizer with such options: {why}"
            hint = "give --optimizer NAME or package:Class, --optimizer-option name=value"
            raise InvalidInput(what, hint=hint) from error

    @classmethod
    def named(cls, optimizer: Self | str) -> Self:
        """Return the optimizer of a name; an optimizer stays as it is."""
        return cls.checked(optimizer, ()) if isinstance(optimizer, str) else optimizer


OptimizerOptions = Mapping[str, OptionValue] | tuple[tuple[str, OptionValue], ...]


def as_options(options: Any) -> tuple[tuple[str, OptionValue], ...]:
    """Return (name, value) pairs of a mapping, or as they are."""
    return tuple(options.items()) if isinstance(options, Mapping) else options


ADAMW = OptimizerChoice()
NamedOptimizer = Annotated[OptimizerChoice | str, AfterValidator(OptimizerChoice.named)]


class ModelSpec(base.Frozen):
    """A model, by its architecture rather than by where its files lie."""

    family: str
    """A name from the registry of families, e.g. `qwen-image`."""
    architecture: str
    """Digest of the transformer's class and configuration."""
    num_parameters: int = base.PositiveInt
    """Number of parameters of the transformer alone."""
    num_blocks: int = base.PositiveInt
    """Number of repeated blocks that can be checkpointed."""
    name: str
    """The hub id or the name of the folder."""


class Bucket(base.Frozen):
    """A shape that images or clips are resized to, and the number of items that have it."""

    width_px: int = base.PositiveInt
    height_px: int = base.PositiveInt
    num_frames: int = base.PositiveInt
    num_items: int = base.NaturalInt

    @property
    def num_pixels(self) -> int:
        """Number of pixels of an item, all frames together."""
        return self.num_frames * self.width_px * self.height_px


class Learning(base.Frozen):
    """Choices that decide what is learned, whatever the model and the data."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Rank of the adapter (network dim); by default the model's."""
    lora_alpha: Annotated[float, base.Option("--alpha")] = Field(default=16.0, ge=1e-3, le=1e6)
    """Alpha of the adapter; by default in proportion to the rank."""
    lora_dropout: Annotated[float, base.Option("--dropout")] = Field(default=0.0, ge=0, le=0.9)
    """Share of the adapter's inputs to drop; any at all takes memory for a copy of them."""
    targets: str = "attention"
    """Adapted layers: attention (default), attention+mlp, all-linear; SDXL: attention+mlp+proj; or
    patterns of names: to_q,ff.*."""
    adapted_blocks: Annotated[str, base.Option("--blocks", metavar="RANGES")] = Field(
        default="all", pattern=BLOCK_RANGES, max_length=200
    )
    """Adapt only layers of these blocks, numbered from 0: 10-30 or 0-4,18."""
    adapter: AdapterKind = "lora"
    """LoRA; rsLoRA, scaled by alpha over the root of the rank; DoRA, which learns the norms of
    outputs, too; or LoKr, Kronecker products."""
    lokr_factor: Annotated[int, base.Option("--factor")] = Field(default=0, ge=0, le=4096)
    """Rows and columns of LoKr's smaller matrix where they divide the layer's; by default (0) both
    matrices are about square. A rank from half of the larger one's size on keeps that whole."""
    ema_decay: Annotated[float, base.Option("--ema")] = Field(default=0.0, ge=0, le=0.99999)
    """Save an average of steps with this decay, e.g. 0.999; by default none."""
    effective_batch_size: Annotated[int, base.Option("--batch-size")] = Field(
        default=1, ge=1, le=65536
    )
    """Images of one optimizer step (batch size x gradient accumulation x GPUs); by default the
    model's. How many pass at once is tuned."""
    preserve_prior: float = Field(default=0.0, ge=0, le=0.9)
    """Share of images, e.g. 0.2, that learn what the base model makes of their caption without the
    trigger, so that less is forgotten. By default none."""
    quality: Quality = "high"
    """Bits that the base model may be stored in: exact (16), high (8, too) or compact (4, too, and
    computing in 8)."""
    objective: Objective = "throughput"
    """Goal of the search: the fastest steps (throughput), or those with the least memory."""


class WorkloadRequest(Learning, base.Request):
    """A user's part of a workload; the rest is the family's or the data's."""

    resolution: Annotated[base.ImageSize | None, base.Option(metavar="SIDE|WIDTHxHEIGHT")] = None
    """Size of images in pixels; images of other shapes get about its area."""
    side_px: Annotated[int | None, base.HIDDEN] = Field(default=None, ge=1)
    """Side of a square of the size's area, without a size: it need not be a multiple of any."""
    num_frames: Annotated[int, base.Option("--frames")] = Field(default=1, ge=1)
    """Frames of a clip; above 1, videos and subfolders of images in the data are clips."""
    text_tokens: Annotated[int | None, base.HIDDEN] = Field(default=None, ge=1)
    """Length of captions if there is no data to count it from."""
    optimizer: NamedOptimizer = ADAMW
    """adamw (default), adamw-8bit, adafactor, lion, prodigy, schedule-free; or package:Class, which
    is loaded only if you name it."""
    optimizer_options: Annotated[
        OptimizerOptions,
        AfterValidator(as_options),
        base.Option("--optimizer-option", metavar="NAME=VALUE"),
    ] = ()
    """An option of the optimizer, besides learning rate and weight decay."""

    @classmethod
    def again(cls, work: "Workload", *, has_data: bool = True) -> Self:
        """Return the request for `work` on data of its class; without data it names the shape."""
        largest = work.largest_bucket
        shape: dict[str, Any] = {"side_px": work.resolution_px}
        if not has_data:
            size = (largest.width_px, largest.height_px)
            shape = {"resolution": size, "text_tokens": work.max_text_tokens}
        learning = {name: getattr(work, name) for name in Learning.model_fields}
        return cls(**learning, **shape, num_frames=largest.num_frames, optimizer=work.optimizer)

    @property
    def size_px(self) -> tuple[int, int] | None:
        """(width, height), if it was given."""
        return None if self.resolution is None else base.image_size(self.resolution)

    @property
    def optimizer_choice(self) -> OptimizerChoice:
        """The optimizer with its options."""
        choice = OptimizerChoice.named(self.optimizer)
        options = {**dict(choice.options), **dict(self.optimizer_options)}
        return OptimizerChoice.checked(choice.name, tuple(options.items()))


class Workload(Learning):
    """The class of work that a plan is made for: all that decides memory and speed."""

    model: ModelSpec
    resolution_px: int = base.PositiveInt
    """Side of the square whose area every bucket stays within."""
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    max_text_tokens: int = base.PositiveInt
    """Length of the longest encoded caption. With the largest bucket it decides memory."""
    text_token_quantiles: tuple[PositiveTokens, ...] = Field(default=(), max_length=64)
    """Lengths of encoded captions in ascending order, each standing for the same number of
    captions: they decide speed. Empty if all captions are about as long as the longest."""
    text_padding: TextPadding
    is_slider: bool = False
    """True if the target is what the base predicts for other prompts, in place of pictures."""
    num_control_images: int = Field(default=0, ge=0)
    """The most control images that an item has; 0 unless the model edits images."""
    rank: int = base.PositiveInt
    lora_alpha: float = Field(gt=0)
    effective_batch_size: int = base.PositiveInt
    targets: str
    optimizer: OptimizerChoice = ADAMW

    @property
    def has_clips(self) -> bool:
        return self.largest_bucket.num_frames > 1

    @property
    def largest_bucket(self) -> Bucket:
        """The bucket with the most pixels, which decides peak memory."""
        return max(self.buckets, key=lambda b: (b.num_pixels, b.width_px))

    @property
    def base_passes(self) -> float:
        """Passes through the base for each image, in the mean."""
        return float(SLIDER_PROMPTS) if self.is_slider else self.preserve_prior

    @model_validator(mode="after")
    def _quantiles_in_order(self) -> Self:
        lengths = (*self.text_token_quantiles, self.max_text_tokens)
        if any(after < before for before, after in pairwise(lengths)):
            raise ValueError("text_token_quantiles must rise, and none be above max_text_tokens")
        return self

    def share(self, num_processes: int) -> "Workload":
        """Return the workload of each process: its part of the effective batch, rounded down."""
        batch = max(1, self.effective_batch_size // num_processes)
        return self if num_processes == 1 else self.changed(effective_batch_size=batch)


NEARLY = 0.95  # share of the largest above which typical shapes and captions count as the largest
GOLDEN_RATIO = 0.618034


def has_typical_shape(workload: Workload) -> bool:
    """Tell if the typical step has less to do than a step in the largest shapes."""
    has_lengths = bool(workload.text_token_quantiles)
    return has_lengths or typical_bucket(workload) != workload.largest_bucket


def typical_bucket(workload: Workload) -> Bucket:
    """Return the bucket nearest to the mean size: a step in it takes about the mean time."""
    largest, items = workload.largest_bucket, sum(b.num_items for b in workload.buckets)
    mean = sum(b.num_items * b.num_pixels for b in workload.buckets) / max(1, items)
    if mean >= NEARLY * largest.num_pixels or not items:
        return largest
    return min(workload.buckets, key=lambda b: (abs(b.num_pixels - mean), b.width_px))


def mean_text_tokens(workload: Workload) -> int:
    """Compute the mean length of an encoded caption."""
    return _lengths(workload, 1)[0]


def typical_text_tokens(workload: Workload) -> tuple[int, ...]:
    """Caption lengths of one typical step, one for each image of the effective batch."""
    size = workload.effective_batch_size
    spread = _lengths(workload, size)
    # In an order that mixes, so that each micro-batch is padded as one drawn at random would be.
    return tuple(spread[i] for i in sorted(range(size), key=lambda i: i * GOLDEN_RATIO % 1))


def padded_text_tokens(
    workload: Workload, micro_batch_size: int, image_tokens: int = 0, multiple: int = 1
) -> float:
    """Return the mean padded length of captions in micro-batches of this size (`pad_text`)."""
    tokens = typical_text_tokens(workload)
    groups = [
        tokens[start : start + micro_batch_size]
        for start in range(0, len(tokens), micro_batch_size)
    ]
    return sum(len(group) * pad_text(max(group), image_tokens, multiple) for group in groups) / len(
        tokens
    )


def pad_text(text_tokens: int, image_tokens: int, multiple: int) -> int:
    """Return the least length that makes text and image together a multiple of tokens."""
    return text_tokens + -(image_tokens + text_tokens) % multiple


def quantiles_of(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` quantiles of sorted lengths; none if all are about as long as the longest."""
    if sum(lengths) >= NEARLY * len(lengths) * lengths[-1]:
        return ()
    return means_of_parts(lengths, count)


def means_of_parts(values: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the means of `count` equal parts of sorted values, each of at least one value."""
    starts = [i * len(values) // count for i in range(count + 1)]
    parts = [values[start : max(start + 1, end)] for start, end in pairwise(starts)]
    return tuple(round(sum(part) / len(part)) for part in parts)


def _lengths(workload: Workload, count: int) -> tuple[int, ...]:
    return means_of_parts(workload.text_token_quantiles or (workload.max_text_tokens,), count)
