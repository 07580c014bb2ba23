"""Checks before a run's long work: plan, machine, model, data, output folder and disk."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import Dataset, SplitDataset, read_split, slider_data
from autotune.data.items import EMPTY_CAPTION, make_options
from autotune.data.pixels import has_video_decoder
from autotune.errors import InvalidInput, first_line
from autotune.events import Notice, OnEvent
from autotune.knobs.knob import TuningContext
from autotune.knobs.settings import check_options, optimizer_bytes, usual_learning_rate
from autotune.models import facts, registry, resolve
from autotune.models.adapter import adapter_shapes, add_adapter, choose_layers, target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.models.resolve import ResolvedModel
from autotune.plan.base import log_event
from autotune.plan.file import RUN_PLAN_FILE, load_plan, with_job
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import Job
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import (
    Bucket,
    Learning,
    OptimizerChoice,
    Workload,
    WorkloadRequest,
    quantiles_of,
)
from autotune.system import files, process
from autotune.system.lazy import torch
from autotune.train import fit, folder, metrics
from autotune.weights.files import open_weights, read_header, weights_digest
from autotune.weights.names import can_write

INSTALL_VIDEO = "pip install 'lora-autotune[video]'"
SANE_RATES = 100.0
"""Factor above and below the usual learning rate beyond which one is a mistake: 1 is Prodigy's."""


@dataclass(frozen=True)
class RunInputs:
    """Checked inputs of a run; `model` is None while it is to be fetched from the hub."""

    data: SplitDataset
    model: ResolvedModel | None


def read_inputs(plan: TrainingPlan, *, resume: bool) -> RunInputs:
    """Check the job, the output folder and a local model, and read the data."""
    job, workload = plan.job, plan.frozen.workload
    if job.data is None and not job.slider:
        raise InvalidInput(
            "the plan names no data folder", hint="name one: autotune train plan.yaml --data FOLDER"
        )
    require_even_shares(workload.effective_batch_size, plan.frozen.hardware.num_processes)
    metrics.require_tracker(job.report_to)
    family = registry.get_family(workload.model.family)
    check_job(job, family.with_expert(job.expert), workload.optimizer)
    folder.require_separate_output(job)
    folder.check_folder(plan, resume=resume)
    for adapter in filter(None, (job.from_adapter, job.training_adapter)):
        read_header(Path(adapter))
    model = None if resolve.is_fetchable(job.model_ref) else read_model(plan)
    if job.slider:
        shape = workload.largest_bucket
        data = slider_data(job.slider, shape.width_px, shape.height_px)
    else:
        options = make_options(dict(job), family, job.num_frames)
        data = read_split(job.data or (), options, job.validation, job.seed)
    check_options(workload.optimizer)  # which imports that of another name
    return RunInputs(data, model)


def read_model(plan: TrainingPlan) -> ResolvedModel:
    """Resolve the plan's model and read the headers of all its weights."""
    model = resolve.resolve_model(plan.job.model_ref)
    resolve.check_weights(model)
    return model


@dataclass(frozen=True)
class PreparedRun:
    """The checked inputs of a run, with its output folder locked until it ends."""

    model: ResolvedModel
    data: SplitDataset
    workload: Workload
    output: Path
    lock: FileLock
    weights: str  # digest of the transformer's


def prepare(
    plan: TrainingPlan, hardware: HardwareProfile, *, resume: bool, inputs: RunInputs | None = None
) -> PreparedRun:
    """Check everything that can fail before any long work."""
    _require_machine(plan, hardware)
    inputs = inputs or read_inputs(plan, resume=resume)
    data, model = inputs.data, inputs.model or read_model(plan)
    job, planned = plan.job, plan.frozen.workload
    fit.require_model(plan, model)
    request, drops_captions = WorkloadRequest.again(planned), job.caption_dropout > 0
    workload = describe_workload(model, data.whole, request, drops_captions=drops_captions)
    fit.require_fit(fit.data_misfits(plan, TuningContext(hardware, model.family, workload)))
    weights = weights_digest(open_weights(model.transformer_file))
    if job.training_adapter is not None:  # which is part of what learns
        weights += weights_digest(open_weights(Path(job.training_adapter)))
    if resume:
        folder.require_same_weights(Path(job.output), weights)
    needed_bytes = _output_bytes(plan, model, data.training.epoch_size)
    is_first = process.is_first_process()  # which locks it for all
    lock = folder.claim_folder(plan, resume=resume, needed_bytes=needed_bytes, lock=is_first)
    return PreparedRun(model, data, workload, Path(job.output), lock, weights)


def _require_machine(
    plan: TrainingPlan, hardware: HardwareProfile, *, by_keys: bool = False
) -> None:
    launch = process.current_launch()
    if launch and launch.is_own:  # what started it has looked, and the first may be loading by now
        return
    local = launch.local_world_size if launch else plan.frozen.hardware.num_processes
    misfits = (
        fit.key_misfits(plan, hardware) if by_keys else fit.hardware_misfits(plan, hardware, local)
    )
    fit.require_fit((*misfits, *(() if launch else fit.card_misfits(plan, hardware, local))))


def fetch_weights(plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan:
    """Download a hub's model and return the plan with its commit; a local one stays."""
    job = plan.job
    if not resolve.is_on_hub(job.model_ref):
        return plan
    may_change = plan.frozen.expected.evidence == "predicted"  # to settings that fit
    _require_machine(plan, hardware, by_keys=may_change)
    return with_job(plan, revision=resolve.fetch_model(job.model_ref).revision)


def _output_bytes(plan: TrainingPlan, model: ResolvedModel, epoch_size: int) -> int:
    workload, job = plan.frozen.workload, plan.job
    transformer = build_on_meta(model.family, model.config)
    if job.training_adapter is not None:
        from autotune.train.model import TrainingAdapter

        frozen = TrainingAdapter(Path(job.training_adapter), transformer, model.family)
        frozen.require_with(plan.frozen.settings, workload, transformer, model.family)
    shapes = adapter_shapes(model.family, transformer, workload)
    adapter_bytes = sum(math.prod(shape) * count for shape, count in shapes.items()) * 4
    if job.from_adapter is not None:  # before any long work
        add_adapter(model.family, transformer, workload, torch.float32)
        folder.starting_values(Path(job.from_adapter), transformer, model.family)
    batch = workload.effective_batch_size
    every = job.checkpoint_every(epoch_size, batch) * job.checkpoints_keep_every
    num_permanent = job.steps_on(epoch_size, batch) // every if every else 0
    state_bytes, _ = optimizer_bytes(workload.optimizer, shapes)
    checkpoint_bytes = adapter_bytes * (1 + bool(workload.ema_decay)) + state_bytes
    num_checkpoints = job.checkpoints_total_limit + 1 + num_permanent
    return adapter_bytes * (1 + job.keep_best) + checkpoint_bytes * num_checkpoints


NUM_QUANTILES = 16  # of caption lengths


def require_even_shares(batch: int, num_processes: int) -> None:
    """Raise InvalidInput if processes would get unequal parts of the effective batch."""
    if batch % num_processes:
        more = batch + num_processes - batch % num_processes
        raise InvalidInput(
            f"an effective batch of {batch} cannot be shared evenly by {num_processes} processes",
            hint=f"make the plan with a multiple of --gpus, e.g. --batch-size {more}",
        )


def check_job(job: Job, family: Family, optimizer: OptimizerChoice) -> None:
    """Raise InvalidInput if the job asks for what cannot be, or cannot learn at its rate."""
    usual = usual_learning_rate(optimizer, family.defaults.learning_rate)
    is_known, (low, high) = ":" not in optimizer.name, (usual / SANE_RATES, usual * SANE_RATES)
    if is_known and not low <= job.learning_rate <= high:
        raise InvalidInput(
            f"{optimizer.name} cannot learn at a learning rate of {job.learning_rate:g}",
            hint=f"use --learning-rate {usual:g}, or one from {low:.3g} to {min(high, 1.0):.3g}",
        )
    if job.timestep_shift == "by_resolution" and family.defaults.shift_by_tokens is None:
        hint = f"give a number: --timestep-shift {family.defaults.timestep_shift}"
        raise InvalidInput(f"{family.name} has no timestep shift by resolution", hint=hint)
    if job.guidance_scale is not None and family.defaults.training_guidance is None:
        raise InvalidInput(
            f"{family.name} takes no guidance in training", hint="leave --guidance out"
        )
    if job.keep_best and job.validation is None:
        hint = "hold some out: --validation 10%"
        raise InvalidInput("without held-out images nothing shows which adapter is best", hint=hint)
    if not can_write(job.adapter_format, family.transformer_class):
        what = f"adapters of {family.name} that autotune knows how to write"
        hint = "leave --adapter-format out: diffusers loads them"
        raise InvalidInput(f"{job.adapter_format} loads no {what}", hint=hint)
    if job.slider and (job.data or job.validation):
        hint = "leave --slider out, or --data and --validation"
        raise InvalidInput("a slider is trained without pictures", hint=hint)
    if job.slider and (family.min_controls or family.starts_from_picture):
        what = f"a slider is trained without pictures, and {family.name} starts from one"
        raise InvalidInput(what, hint="train it on a model from text")
    family.noise.check_weighting(job.weighting_scheme, family.name)
    family.check_num_frames(job.num_frames)


def check_overrides(family: Family, request: WorkloadRequest) -> Bucket:
    """Return the bucket of the requested or usual size and length; refuse bad numbers."""
    defaults, given = family.defaults, request.given
    num_frames = given.get("num_frames", defaults.num_frames)
    numbers = {name: given.get(name, 1) for name in ("rank", "effective_batch_size", "text_tokens")}
    for name, value in {**numbers, "frames": num_frames}.items():
        if value < 1:
            words = name.replace("_", " ")
            hint = f"the nearest valid value is {words} 1"
            raise InvalidInput(f"{words} must be at least 1, not {value}", hint=hint)
    width, height = request.size_px or (defaults.resolution_px, defaults.resolution_px)
    step, max_px = family.size_multiple_px, family.max_side_px
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
        message = "a slider is no DoRA, and preserves no prior: it must turn around at strength -1"
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
            raise InvalidInput(
                f"{targets!r} names different layers in different blocks of {name}", hint=hint
            )


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


MAX_STRENGTH = 10.0  # of an adapter: with more nothing is left of the picture


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample from one prompt, each from a seed one higher than the last."""

    prompt: str
    count: int = 1
    seed: int = 0
    num_steps: int | None = None  # None for the job's
    control_paths: tuple[Path, ...] = ()
    # None for a file in the run's folder or beside the plan; several get numbers. A clip is an
    # .mp4; any other name gets its first frame as a PNG.
    output: Path | None = None
    # Factors of the adapter's effect: 0 is the model as it is, 1 what was trained.
    strengths: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class SampleInputs:
    """A checked request with its run; without an adapter it shows the model as it is."""

    request: SampleRequest
    plan: TrainingPlan
    model: ResolvedModel
    adapter: Path | None
    file: Path


def read_sample_inputs(
    run: Path,
    request: SampleRequest,
    on_event: OnEvent = log_event,
    require: Callable[[TrainingPlan], None] = lambda plan: None,
) -> SampleInputs:
    """Read what sampling takes; `require` may refuse a plan before its model is fetched."""
    if not run.exists():
        raise InvalidInput(f"there is no run and no plan at {run}", hint="check the path")
    adapter = None if run.is_file() else run / folder.ADAPTER_FILE
    if adapter and not (adapter.is_file() and (run / RUN_PLAN_FILE).is_file()):
        hint = "name the output folder of `autotune train`"
        raise InvalidInput(f"{run} holds no trained adapter", hint=hint)
    if not request.strengths or not all(abs(one) <= MAX_STRENGTH for one in request.strengths):
        hint = f"give one or more from 0 to {MAX_STRENGTH:g}: 1 is the adapter as it was trained"
        raise InvalidInput("there is no such strength of an adapter", hint=hint)
    missing = [path for path in request.control_paths if not path.is_file()]
    if missing:
        raise InvalidInput(f"there is no control image {missing[0]}", hint="check the path")
    if adapter:
        read_header(adapter)
    plan = load_plan(run / RUN_PLAN_FILE if adapter else run)
    bucket = plan.frozen.workload.largest_bucket
    is_clip = bucket.num_frames > 1
    if request.output is None and is_clip and not has_video_decoder():
        text = f"only a clip's first frame is written without PyAV: {INSTALL_VIDEO}"
        on_event(Notice(text=text, level="warning"))
    suffix = ".mp4" if is_clip and has_video_decoder() else ".png"
    file = request.output or (run if adapter else run.parent) / f"sample-{request.seed}{suffix}"
    files.require_writable(file)
    if file.suffix == ".mp4" and not has_video_decoder():
        message = "an mp4 is written with PyAV, which is not installed"
        raise InvalidInput(message, hint=INSTALL_VIDEO)
    if not adapter:
        require(plan)
    model = resolve.fetch_model(plan.job.model_ref)
    model.family.check_prompt(len(request.control_paths))
    return SampleInputs(request, plan, model, adapter, file)
