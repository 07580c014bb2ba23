"""From a dataset to the workload: the shapes and lengths that decide memory and speed."""

import math
from typing import Any

from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import Dataset
from autotune.data.items import EMPTY_CAPTION
from autotune.errors import InvalidInput, first_line
from autotune.models.adapter import choose_layers, target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.models.resolve import ResolvedModel
from autotune.plan.job import Job
from autotune.plan.workload import Bucket, Learning, Workload, WorkloadRequest, quantiles_of
from autotune.weights.names import can_write

# Of caption lengths.
NUM_QUANTILES = 16


def require_even_shares(batch: int, num_processes: int) -> None:
    """Raise InvalidInput if processes would get unequal parts of the effective batch."""
    if batch % num_processes:
        more = batch + num_processes - batch % num_processes
        raise InvalidInput(
            f"an effective batch of {batch} cannot be shared evenly by {num_processes} processes",
            hint=f"make the plan with a multiple of --gpus, e.g. --batch-size {more}",
        )


def check_job(job: Job, family: Family) -> None:
    """Raise InvalidInput if the job lacks what an option needs, or its family lacks the option."""
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


def check_overrides(family: Family, request: WorkloadRequest) -> Bucket:
    """Return the bucket of the requested or usual size and length; refuse bad numbers."""

    defaults, given = family.defaults, request.given
    width, height = request.size_px or (defaults.resolution_px, defaults.resolution_px)
    for name in ("rank", "effective_batch_size", "text_tokens"):
        positive(name.replace("_", " "), given.get(name, 1))
    return checked_bucket(family, width, height, given.get("num_frames", defaults.num_frames))


def describe_workload(
    model: ResolvedModel,
    dataset: Dataset | None,
    request: WorkloadRequest,
    *,
    drops_captions: bool = False,
) -> Workload:
    """Describe training `model` on `dataset`; `drops_captions` adds the empty caption.

    Without a dataset there is one bucket, with captions of the family's usual length. Raises
    InvalidInput for sizes, captions, targets or control images that the model does not take.
    """
    family, defaults = model.family, model.family.defaults
    bucket = check_overrides(family, request)
    num_controls = _num_controls(family, dataset)
    _check_learning(model, request)  # before captions are read
    resolution = math.isqrt(bucket.width_px * bucket.height_px)
    given = {name: value for name, value in request.given.items() if name in Learning.model_fields}
    rank = given.get("rank", defaults.rank)
    usual = {
        "rank": rank,
        "lora_alpha": defaults.lora_alpha * rank / defaults.rank,
        "effective_batch_size": defaults.effective_batch_size,
        "targets": request.targets,
    }
    sides = family.size_multiple_px, family.max_side_px
    buckets = (bucket,) if dataset is None else make_buckets(dataset, resolution, *sides)
    lengths = sorted(_text_lengths(model, dataset, buckets, request.text_tokens, drops_captions))
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
        optimizer=request.optimizer_choice,
        **{**usual, **given},
    )


def _check_learning(model: ResolvedModel, request: WorkloadRequest) -> None:
    from autotune.knobs.optimizer import check_options

    family = model.family
    optimizer = request.optimizer_choice
    check_options(optimizer)
    if request.ema_decay and optimizer.name == "schedule-free":
        raise InvalidInput("schedule-free already averages its steps", hint="leave --ema out")
    if request.targets not in family.target_sets or request.adapted_blocks != "all":
        transformer = build_on_meta(family, model.config)
        choose_layers(family, transformer, request.targets, request.adapted_blocks)
        _require_alike(family, transformer, request.targets)


def _require_alike(family: Family, transformer: Any, targets: str) -> None:
    """Refuse patterns that tell blocks of one kind apart: predictions repeat one of them."""
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
    usual = model.family.defaults.text_tokens if text_tokens is None else text_tokens
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


def checked_bucket(family: Family, width_px: int, height_px: int, num_frames: int = 1) -> Bucket:
    """Return the bucket of this shape; raise InvalidInput if the family cannot take it."""
    for name, side in (("width", width_px), ("height", height_px)):
        step, max_px = family.size_multiple_px, family.max_side_px
        if side < step or side % step or side > max_px:
            nearest = min(max(step, round(side / step) * step), max_px // step * step)
            raise InvalidInput(
                f"a {name} of {side} px does not suit {family.name}: sides are multiples of {step} "
                f"px up to {max_px}",
                hint=f"the nearest valid {name} is {nearest} px",
            )
    positive("frames", num_frames)
    family.check_num_frames(num_frames)
    return Bucket(width_px=width_px, height_px=height_px, num_frames=num_frames, num_items=1)


def positive(name: str, value: int) -> int:
    """Return `value`; raise InvalidInput if it is less than 1."""
    if value < 1:
        raise InvalidInput(
            f"{name} must be at least 1, not {value}", hint=f"the nearest valid value is {name} 1"
        )
    return value
