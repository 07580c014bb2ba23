"""From a dataset to the workload: the shapes and lengths that decide memory and speed. Loads no
weights."""

import math
from dataclasses import dataclass

from torch import nn

from autotune.cost.estimate import checked_bucket, positive
from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import Dataset
from autotune.data.items import EMPTY_CAPTION
from autotune.errors import InvalidInput, first_line
from autotune.knobs.optimizer import check_options
from autotune.models.adapter import choose_layers, target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.models.resolve import ResolvedModel
from autotune.plan.job import Job
from autotune.plan.typical import quantiles_of
from autotune.plan.workload import (
    ADAMW,
    AdapterKind,
    Bucket,
    Objective,
    OptimizerChoice,
    Quality,
    Workload,
)
from autotune.weights.names import can_write

NUM_QUANTILES = 16
"""Number of caption lengths that a workload holds."""


@dataclass(frozen=True)
class WorkloadOverrides:
    """Properties of a workload that a user may set; None means the family's default."""

    size_px: tuple[int, int] | None = None
    """(width, height). With data, its area is the maximum area of a bucket."""
    num_frames: int | None = None
    text_tokens: int | None = None
    """Length of captions when there is no data to count it from."""
    rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    targets: str = "attention"
    adapted_blocks: str = "all"
    adapter: AdapterKind = "lora"
    ema_decay: float = 0.0
    optimizer: OptimizerChoice = ADAMW
    effective_batch_size: int | None = None
    quality: Quality = "high"
    objective: Objective = "throughput"


COPIED_FIELDS = (
    *("lora_dropout", "targets", "adapted_blocks", "adapter", "ema_decay", "optimizer"),
    *("quality", "objective"),
)
"""Fields that a workload has under the same names."""
FAMILY_FIELDS = ("rank", "lora_alpha", "effective_batch_size")
"""Such fields whose defaults are the family's."""


def overrides_from(workload: Workload, *, has_data: bool = True) -> WorkloadOverrides:
    """The overrides that give `workload` again, on data of its class; without data they name its
    shape and length."""
    largest, side = workload.largest_bucket, workload.resolution_px
    size_px = (side, side) if has_data else (largest.width_px, largest.height_px)
    text_tokens = None if has_data else workload.max_text_tokens
    copied = {name: getattr(workload, name) for name in (*COPIED_FIELDS, *FAMILY_FIELDS)}
    return WorkloadOverrides(
        size_px=size_px, num_frames=largest.num_frames, text_tokens=text_tokens, **copied
    )


def require_even_shares(batch: int, num_processes: int) -> None:
    """Raise InvalidInput if processes would get unequal parts of the effective batch."""
    if batch % num_processes:
        more = batch + num_processes - batch % num_processes
        raise InvalidInput(
            f"an effective batch of {batch} cannot be shared evenly by {num_processes} processes",
            hint=f"make the plan with a multiple of --gpus, e.g. --batch {more}",
        )


def check_job(job: Job, family: Family) -> None:
    """Raise InvalidInput if the job lacks what an option needs, or its model's family lacks the
    option."""
    if job.timestep_shift == "by_resolution" and family.defaults.shift_by_tokens is None:
        raise InvalidInput(
            f"{family.name} has no timestep shift by resolution",
            hint=f"give a number: --timestep-shift {family.defaults.timestep_shift}",
        )
    if job.guidance_scale is not None and family.defaults.training_guidance is None:
        raise InvalidInput(
            f"{family.name} takes no guidance in training", hint="leave --guidance out"
        )
    if job.keep_best and job.validation is None:
        raise InvalidInput(
            "without held-out images nothing shows which adapter is best",
            hint="hold some out: --validation 10%",
        )
    if not can_write(job.adapter_format, family.transformer_class):
        raise InvalidInput(
            f"{job.adapter_format} loads no adapters of {family.name} that autotune knows how to "
            "write",
            hint="leave --adapter-format out: diffusers loads them",
        )
    family.noise.check_weighting(job.weighting_scheme, family.name)
    family.check_num_frames(job.num_frames)


def check_overrides(family: Family, overrides: WorkloadOverrides) -> Bucket:
    """The bucket of the size and length that are asked for, or usual.

    Raises:
        InvalidInput: a size or a number is not positive or does not suit the family.
    """
    defaults = family.defaults
    width, height = overrides.size_px or (defaults.resolution_px, defaults.resolution_px)
    positive("rank", given(overrides.rank, defaults.rank))
    positive("batch", given(overrides.effective_batch_size, defaults.effective_batch_size))
    positive("text tokens", given(overrides.text_tokens, defaults.text_tokens))
    return checked_bucket(family, width, height, given(overrides.num_frames, defaults.num_frames))


def describe_workload(
    model: ResolvedModel,
    dataset: Dataset | None,
    overrides: WorkloadOverrides,
    *,
    drops_captions: bool = False,
) -> Workload:
    """The workload of training `model` on `dataset`; with `drops_captions` the empty caption is one
    of its captions.

    Without a dataset it has one bucket, captions of the family's usual length, and one control
    image for edit models.

    Raises:
        InvalidInput: a size is not positive or does not suit the model, a caption is too long for
            it, the family has no such target set, or an item has too many or too few control
            images.
    """
    family, defaults = model.family, model.family.defaults
    bucket = check_overrides(family, overrides)
    num_controls = _num_controls(family, dataset)
    _check_learning(model, overrides)  # before captions are read
    resolution, rank = (
        math.isqrt(bucket.width_px * bucket.height_px),
        given(overrides.rank, defaults.rank),
    )
    sides = family.size_multiple_px, family.max_side_px
    buckets = (bucket,) if dataset is None else make_buckets(dataset, resolution, *sides)
    lengths = sorted(_text_lengths(model, dataset, buckets, overrides.text_tokens, drops_captions))
    if lengths[-1] > family.max_text_tokens:
        raise InvalidInput(
            f"{family.name} accepts no caption of {lengths[-1]} tokens",
            hint=f"the nearest valid length is {family.max_text_tokens} tokens",
        )
    return Workload(
        model=model.spec,
        resolution_px=resolution,
        buckets=buckets,
        max_text_tokens=lengths[-1],
        text_token_quantiles=quantiles_of(lengths, NUM_QUANTILES),
        text_padding="exact" if len(set(lengths)) == 1 else "masked",
        num_control_images=num_controls,
        rank=rank,
        lora_alpha=overrides.lora_alpha or defaults.lora_alpha * rank / defaults.rank,
        effective_batch_size=given(overrides.effective_batch_size, defaults.effective_batch_size),
        **{name: getattr(overrides, name) for name in COPIED_FIELDS},
    )


def _check_learning(model: ResolvedModel, overrides: WorkloadOverrides) -> None:
    """Raise InvalidInput if the model has no such layers, or the optimizer cannot be had."""
    family = model.family
    check_options(overrides.optimizer)
    if overrides.ema_decay and overrides.optimizer.name == "schedule-free":
        raise InvalidInput("schedule-free already averages its steps", hint="leave --ema out")
    if overrides.targets not in family.target_sets or overrides.adapted_blocks != "all":
        transformer = build_on_meta(family, model.config)
        choose_layers(family, transformer, overrides.targets, overrides.adapted_blocks)
        _require_alike(family, transformer, overrides.targets)


def _require_alike(family: Family, transformer: "nn.Module", targets: str) -> None:
    """Raise InvalidInput if patterns tell blocks of one kind apart: what is predicted repeats
    one of them."""
    is_target, number = target_matcher(family, targets), 0
    for name, blocks in family.find_block_lists(transformer).items():
        chosen: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for at, block in enumerate(blocks[1:-1], 1):
            parts = tuple(part for part, _ in block.named_modules())
            chosen.setdefault(parts, set()).add(
                tuple(part for part in parts if is_target(f"{name}.{at}.{part}"))
            )
        number += len(blocks)
        if any(len(each) > 1 for each in chosen.values()):
            hint = f"name the blocks by an option of their own: --blocks 0-{number - 1}"
            raise InvalidInput(
                f"{targets!r} names different layers in different blocks of {name}", hint=hint
            )


def given(value: int | None, default: int) -> int:
    """`value`, or `default` if it is None; 0 stays 0, to be refused later."""
    return default if value is None else value


def _num_controls(family: Family, dataset: Dataset | None) -> int:
    if dataset is None:
        return min(1, family.max_controls)
    for item in dataset.items:
        family.check_num_controls(len(item.control_paths), item.path.name)
    return max(len(item.control_paths) for item in dataset.items)


def _text_lengths(
    model: ResolvedModel,
    dataset: Dataset | None,
    buckets: tuple[Bucket, ...],
    text_tokens: int | None,
    drops_captions: bool,
) -> list[int]:
    usual = given(text_tokens, model.family.defaults.text_tokens)
    if model.config_folder is None or dataset is None:
        return [usual, max(1, usual - 1)]  # without data, captions are assumed to differ in length
    sizes = [(bucket.width_px, bucket.height_px) for bucket in buckets]
    controls = [
        [sizes[index]] * len(item.control_paths)
        for item, index in zip(dataset.items, assign_buckets(dataset, buckets), strict=True)
        for _ in item.captions
    ]
    captions = [caption for item in dataset.items for caption in item.captions]
    if drops_captions:
        captions, controls = [*captions, EMPTY_CAPTION], [*controls, controls[0]]
    hint = "download the model again; a file is missing or damaged"
    try:
        lengths = model.family.count_text_tokens(model.config_folder, captions, controls)
    except (InvalidInput, ImportError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # a damaged tokenizer raises anything
        reason = first_line(error)
        raise InvalidInput(
            f"the tokenizer in {model.config_folder} cannot be read: {reason}", hint=hint
        ) from error
    if min(lengths) < 0 or not any(lengths):  # without its vocabulary it loads all the same
        raise InvalidInput(
            f"the tokenizer in {model.config_folder} returns no tokens for the captions", hint=hint
        )
    return lengths
