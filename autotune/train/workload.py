"""What a run has to compute, as a workload; refuses jobs that cannot be or cannot learn."""

import math
from typing import Any

from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import Dataset
from autotune.data.items import EMPTY_CAPTION
from autotune.errors import InvalidInput, first_line
from autotune.knobs.settings import check_options, usual_learning_rate
from autotune.models import facts
from autotune.models.adapter import choose_layers, target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.models.resolve import ResolvedModel
from autotune.plan.job import AdapterFormat, Job
from autotune.plan.workload import (
    Bucket,
    Learning,
    OptimizerChoice,
    Workload,
    WorkloadRequest,
    quantiles_of,
)
from autotune.system.lazy import nn, torch
from autotune.weights.adapters import Adapter, serialize_adapter
from autotune.weights.names import KroneckerLayer, Layer, LoraLayer, lokr_shapes

NUM_QUANTILES = 16  # of caption lengths
SANE_RATES = 100.0
"""Factor above and below the usual learning rate beyond which one is a mistake: 1 is Prodigy's."""


def require_even_shares(batch: int, num_processes: int) -> None:
    """Raise InvalidInput if processes would get unequal parts of the effective batch."""
    if batch % num_processes:
        more = batch + num_processes - batch % num_processes
        what = f"an effective batch of {batch} cannot be shared evenly by {num_processes} processes"
        hint = f"make the plan with a multiple of --gpus, e.g. --batch-size {more}"
        raise InvalidInput(what, hint=hint)


def check_job(job: Job, family: Family, optimizer: OptimizerChoice) -> None:
    """Raise InvalidInput if the job contradicts itself or the model, or its rate is absurd."""
    usual = usual_learning_rate(optimizer, family.defaults.learning_rate)
    is_known, (low, high) = ":" not in optimizer.name, (usual / SANE_RATES, usual * SANE_RATES)
    if is_known and not low <= job.learning_rate <= high:
        what = f"{optimizer.name} cannot learn at a learning rate of {job.learning_rate:g}"
        hint = f"use --learning-rate {usual:g}, or one from {low:.3g} to {min(high, 1.0):.3g}"
        raise InvalidInput(what, hint=hint)
    if job.timestep_shift == "by_resolution" and family.defaults.shift_by_tokens is None:
        hint = f"give a number: --timestep-shift {family.defaults.timestep_shift}"
        raise InvalidInput(f"{family.name} has no timestep shift by resolution", hint=hint)
    if job.guidance_scale is not None and family.defaults.training_guidance is None:
        what = f"{family.name} takes no guidance in training"
        raise InvalidInput(what, hint="leave --guidance out")
    if job.keep_best and job.validation is None:
        hint = "hold some out: --validation 10%"
        raise InvalidInput("without held-out images nothing shows which adapter is best", hint=hint)
    if job.slider and (job.data or job.validation):
        hint = "leave --slider out, or --data and --validation"
        raise InvalidInput("a slider is trained without pictures", hint=hint)
    if job.slider and (family.min_controls or family.starts_from_picture):
        what = f"a slider is trained without pictures, and {family.name} starts from one"
        raise InvalidInput(what, hint="train it on a model from text")
    family.noise.check_weighting(job.weighting_scheme, family.name)
    family.check_num_frames(job.num_frames)


def check_format(to: AdapterFormat, model: ResolvedModel, learning: Learning) -> None:
    """Raise InvalidInput if the adapter could not be written in this format when it is trained."""
    if to == "diffusers":
        return
    is_target, made = target_matcher(model.family, learning.targets), dict[str, Layer]()
    for name, module in build_on_meta(model.family, model.config).named_modules():
        if isinstance(module, nn.Linear) and is_target(name):
            shape = (*module.weight.shape,)
            sizes = lokr_shapes(shape, learning.rank, learning.lokr_factor)
            factors = {part: torch.empty(size, device="meta") for part, size in sizes.items()}
            down, up = (torch.empty(size, device="meta") for size in ((1, shape[1]), (shape[0], 1)))
            norms = up[:, 0] if learning.adapter == "dora" else None
            is_lokr = learning.adapter == "lokr"
            made[name] = KroneckerLayer(factors) if is_lokr else LoraLayer(down, up, 1.0, norms)
    serialize_adapter(Adapter(made, {}, model.family.denoiser), to, model.family.transformer_class)


def check_overrides(family: Family, request: WorkloadRequest) -> Bucket:
    """Return the bucket of the requested or usual size and length; refuse bad numbers."""
    defaults, given = family.defaults, request.given
    num_frames = given.get("num_frames", defaults.num_frames)
    width = height = request.side_px or defaults.resolution_px
    width, height = request.size_px or (width, height)
    is_free = request.size_px is None and request.side_px is not None
    step, max_px = 1 if is_free else family.size_multiple_px, family.max_side_px
    for name, side in (("width", width), ("height", height)):
        if side < step or side % step or side > max_px:
            nearest = min(max(step, round(side / step) * step), max_px // step * step)
            sides = f"sides are multiples of {step} px up to {max_px}"
            message = f"a {name} of {side} px does not suit {family.name}: {sides}"
            raise InvalidInput(message, hint=f"the nearest valid {name} is {nearest} px")
    family.check_num_frames(num_frames)
    return Bucket(
        width_px=width, height_px=height, num_frames=num_frames, num_items=facts.USUAL_IMAGES
    )


def describe_workload(
    model: ResolvedModel,
    dataset: Dataset | None,
    request: WorkloadRequest,
    *,
    drops_captions: bool = False,
) -> Workload:
    """Describe training `model` on `dataset`, or on one bucket of usual captions without one."""
    family, defaults = model.family, model.family.defaults
    bucket = check_overrides(family, request)
    num_controls = _num_controls(family, dataset)
    _check_learning(model, request)  # before captions are read
    resolution = math.isqrt(bucket.width_px * bucket.height_px)
    given = request.given_of(Learning)
    rank = given.get("rank", defaults.rank)
    usual = {
        "rank": rank,
        "lora_alpha": defaults.lora_alpha * rank / defaults.rank,
        "effective_batch_size": defaults.effective_batch_size,
        "targets": request.targets,
    }
    is_slider = dataset is not None and any(item.slides for item in dataset.items)
    if is_slider and (request.adapter == "dora" or request.preserve_prior):
        message = "a slider must turn around at strength -1: DoRA and a preserved prior prevent it"
        raise InvalidInput(message, hint="leave --adapter dora and --preserve-prior out")
    sides = family.size_multiple_px, family.max_side_px
    buckets = (bucket,) if dataset is None else make_buckets(dataset.items, resolution, *sides)
    others = request.text_tokens, drops_captions, is_slider or request.preserve_prior > 0
    lengths = sorted(_text_lengths(model, dataset, buckets, *others))
    if lengths[-1] > family.max_text_tokens:
        hint = f"the nearest valid length is {family.max_text_tokens} tokens"
        raise InvalidInput(f"{family.name} accepts no caption of {lengths[-1]} tokens", hint=hint)
    return Workload(
        model=model.spec,
        resolution_px=resolution,
        buckets=buckets,
        max_text_tokens=lengths[-1],
        text_token_quantiles=quantiles_of(lengths, NUM_QUANTILES),
        text_padding="exact" if len(set(lengths)) == 1 else "masked",
        num_control_images=num_controls,
        optimizer=request.optimizer_choice,
        is_slider=is_slider,
        **{**usual, **given},
    )


def _check_learning(model: ResolvedModel, request: WorkloadRequest) -> None:
    family, optimizer = model.family, request.optimizer_choice
    check_options(optimizer)
    if request.ema_decay and optimizer.name == "schedule-free":
        raise InvalidInput("schedule-free already averages its steps", hint="leave --ema out")
    if request.adapter == "lokr" and request.lora_dropout:
        raise InvalidInput("LoKr has no dropout", hint="leave --dropout out")
    if request.lokr_factor and request.adapter != "lokr":
        raise InvalidInput("only LoKr has a factor", hint="--adapter lokr, or no --factor")
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
            adapted = tuple(part for part in parts if is_target(f"{name}.{at}.{part}"))
            chosen.setdefault(parts, set()).add(adapted)
        number += len(blocks)
        if any(len(each) > 1 for each in chosen.values()):
            hint = f"name the blocks by an option of their own: --blocks 0-{number - 1}"
            what = f"{targets!r} names different layers in different blocks of {name}"
            raise InvalidInput(what, hint=hint)


def _num_controls(family: Family, dataset: Dataset | None) -> int:
    if dataset is None:
        return family.min_controls
    for item in dataset.items:
        family.check_num_controls(len(item.control_paths), item.path.name)
    return max(len(item.control_paths) for item in dataset.items)


def _text_lengths(
    model: ResolvedModel,
    dataset: Dataset | None,
    buckets: tuple[Bucket, ...],
    text_tokens: int | None,
    drops_captions: bool,
    preserves_prior: bool,
) -> list[int]:
    usual = model.family.defaults.text_tokens if text_tokens is None else text_tokens
    if model.config_folder is None or dataset is None:
        return [usual, max(1, usual - 1)]  # without data, captions are assumed to differ in length
    sizes = [(bucket.width_px, bucket.height_px) for bucket in buckets]
    captions: list[str] = []
    controls: list[list[tuple[int, int]]] = []
    for item, index in zip(dataset.items, assign_buckets(dataset.items, buckets), strict=True):
        own = (*item.captions, *item.prior_captions * preserves_prior)
        captions += own
        controls += [[sizes[index]] * len(item.control_paths)] * len(own)
    if drops_captions:
        captions, controls = [*captions, EMPTY_CAPTION], [*controls, controls[0]]
    tokenizer = f"the tokenizer in {model.config_folder}"
    hint = "download the model again; a file is missing or damaged"
    try:
        lengths = model.family.count_text_tokens(model.config_folder, captions, controls)
    except (InvalidInput, ImportError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # a damaged tokenizer raises anything
        raise InvalidInput(f"{tokenizer} cannot be read: {first_line(error)}", hint=hint) from error
    if min(lengths) < 0 or not any(lengths):  # without its vocabulary it loads all the same
        raise InvalidInput(f"{tokenizer} returns no tokens for the captions", hint=hint)
    return lengths
