"""What is trained, as far as it decides memory and speed."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autotune.plan.base import Frozen, NaturalInt, PositiveInt

Quality = Literal["exact", "high", "compact"]
Objective = Literal["throughput", "memory"]
"""What is optimized: time or step memory."""
GOALS: Mapping[Objective, str] = {"throughput": "fastest", "memory": "smallest"}
"""What the winner is by each, among the settings that run."""
BLOCK_RANGES = r"^(all|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)$"
AdapterKind = Literal["lora", "rslora", "dora"]
TextPadding = Literal["exact", "masked"]
"""`exact`: all captions have one length, no mask is ever needed; `masked`: lengths differ."""
PositiveTokens = Annotated[int, PositiveInt]
OptionValue = bool | int | float | str | tuple[float, ...]


class OptimizerChoice(Frozen):
    """The optimizer that the user wants: it decides what is learned, so none is searched."""

    name: str = Field(
        default="adamw",
        pattern=r"^([a-z0-9]+(-[a-z0-9]+)*|[A-Za-z_][\w.]{0,99}:[A-Za-z_]\w{0,99})$",
    )
    """A name from the table in `autotune.knobs.optimizer`, or `package:Class`, which is loaded
    only if the user names it again where the plan is used."""
    options: tuple[tuple[str, OptionValue], ...] = Field(default=(), max_length=32)
    """(name, value) pairs: its keyword arguments."""


ADAMW = OptimizerChoice()


class ModelSpec(Frozen):
    """Which model, by what it is made of rather than by where its files lie.

    Example:
        >>> autotune.estimate("flux1-dev", hardware="4090").workload.model.num_blocks
    """

    family: str
    """A name from the registry of families, e.g. `qwen-image`."""
    architecture: str
    """Digest of the transformer's class and configuration."""
    num_parameters: int = PositiveInt
    """Number of parameters of the transformer alone."""
    num_blocks: int = PositiveInt
    """Number of repeated blocks that can be checkpointed."""
    name: str
    """What people call it: the hub id or the name of the folder."""


class Bucket(Frozen):
    """A shape that images or clips are resized to, and the number of items that have it."""

    width_px: int = PositiveInt
    height_px: int = PositiveInt
    num_frames: int = PositiveInt
    num_items: int = NaturalInt

    @property
    def num_pixels(self) -> int:
        """Number of pixels of an item, all frames together."""
        return self.num_frames * self.width_px * self.height_px


class Workload(Frozen):
    """What is to be trained, as far as it decides memory and speed: the class a plan is made for.

    Example:
        >>> work = autotune.load_plan("plan.yaml").frozen.workload
        >>> work.effective_batch_size, work.rank, work.largest_bucket
    """

    model: ModelSpec
    resolution_px: int = PositiveInt
    """Side of the square whose area every bucket stays within."""
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    max_text_tokens: int = PositiveInt
    """Length of the longest encoded caption. With the largest bucket it decides memory."""
    text_token_quantiles: tuple[PositiveTokens, ...] = Field(default=(), max_length=64)
    """Lengths of encoded captions in ascending order, each standing for the same number of
    captions: they decide speed. Empty if all captions are about as long as the longest."""
    text_padding: TextPadding
    num_control_images: int = Field(default=0, ge=0)
    """The most control images that an item has; 0 unless the model edits images."""
    rank: int = PositiveInt
    lora_alpha: float = Field(gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that a step leaves out. Above 0, every adapted layer keeps
    its own copy of them."""
    targets: str
    """Name of the set of adapted layers, e.g. `attention`, or patterns of their names, separated
    by commas."""
    adapted_blocks: str = Field(default="all", pattern=BLOCK_RANGES, max_length=200)
    """Numbers of the blocks that the adapted layers lie in, from 0 in the order they run:
    `10-30` or `0-4,18`."""
    adapter: AdapterKind = "lora"
    """LoRA; rsLoRA, scaled by alpha over the root of the rank; or DoRA, which learns the norms
    of outputs, too."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the average of the adapter over steps, which is what is saved; 0 keeps none."""
    optimizer: OptimizerChoice = ADAMW
    effective_batch_size: int = PositiveInt
    """Images per optimizer step. The user decides it: tuning never changes what is learned."""
    quality: Quality = "high"
    objective: Objective = "throughput"

    @property
    def largest_bucket(self) -> Bucket:
        """The bucket with the most pixels, which decides peak memory."""
        return max(self.buckets, key=lambda b: (b.num_pixels, b.width_px))

    @model_validator(mode="after")
    def _quantiles_in_order(self) -> Self:
        lengths = (*self.text_token_quantiles, self.max_text_tokens)
        if any(after < before for before, after in pairwise(lengths)):
            raise ValueError("text_token_quantiles must rise, and none be above max_text_tokens")
        return self

    def share(self, num_processes: int) -> "Workload":
        """The workload of each of several processes: its part of the effective batch, rounded
        down."""
        batch = max(1, self.effective_batch_size // num_processes)
        return self if num_processes == 1 else self.changed(effective_batch_size=batch)
