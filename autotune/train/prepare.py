"""Checks before a run's long work: plan, machine, model, data, output folder and disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock

from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import Dataset, SplitDataset, read_split
from autotune.data.items import EMPTY_CAPTION, make_options
from autotune.data.pixels import has_video_decoder
from autotune.errors import DoesNotFit, InvalidInput, first_line
from autotune.events import Notice, OnEvent
from autotune.knobs.caching import why_not_cast
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.knobs.settings import check_options, optimizer_bytes, usual_learning_rate
from autotune.machine.probe import probe
from autotune.models import resolve
from autotune.models.adapter import adapter_shapes, add_adapter, choose_layers, target_matcher
from autotune.models.facts import USUAL_IMAGES
from autotune.models.family import Family, build_on_meta
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import ResolvedModel
from autotune.plan.base import log_event
from autotune.plan.file import RUN_PLAN_FILE, load_plan, with_job
from autotune.plan.hardware import KEY_NAMES, Device, HardwareProfile
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
from autotune.system.files import require_writable
from autotune.system.lazy import torch
from autotune.system.process import current_launch
from autotune.train import folder
from autotune.train.metrics import require_tracker
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
    if job.data is None:
        raise InvalidInput(
            "the plan names no data folder", hint="name one: autotune train plan.yaml --data FOLDER"
        )
    require_even_shares(workload.effective_batch_size, plan.frozen.hardware.num_processes)
    require_tracker(job.report_to)
    family = get_family(workload.model.family)
    check_job(job, family.with_expert(job.expert), workload.optimizer)
    folder.require_separate_output(job)
    folder.check_folder(plan, resume=resume)
    if job.from_adapter is not None:
        read_header(Path(job.from_adapter))
    model = None if resolve.is_fetchable(job.model_ref) else read_model(plan)
    options = make_options(dict(job), family, job.num_frames)
    data = read_split(job.data, options, job.validation, job.seed)
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
    # Digest of the transformer's.
    weights: str


def prepare(
    plan: TrainingPlan, hardware: HardwareProfile, *, resume: bool, inputs: RunInputs | None = None
) -> PreparedRun:
    """Check everything that can fail before any long work."""

    _require_machine(plan, hardware)
    inputs = inputs or read_inputs(plan, resume=resume)
    data, model = inputs.data, inputs.model or read_model(plan)
    job, planned = plan.job, plan.frozen.workload
    require_model(plan, model)
    request, drops_captions = WorkloadRequest.again(planned), job.caption_dropout > 0
    workload = describe_workload(model, data.whole, request, drops_captions=drops_captions)
    require_fit(data_misfits(plan, TuningContext(hardware, model.family, workload)))
    weights = weights_digest(open_weights(model.transformer_file))
    if resume:
        folder.require_same_weights(Path(job.output), weights)
    needed_bytes = _output_bytes(plan, model, data.training.epoch_size)
    launch = current_launch()
    is_first = launch is None or launch.rank == 0  # which locks it for all processes
    lock = folder.claim_folder(plan, resume=resume, needed_bytes=needed_bytes, lock=is_first)
    return PreparedRun(model, data, workload, Path(job.output), lock, weights)


def _require_machine(
    plan: TrainingPlan, hardware: HardwareProfile, *, by_keys: bool = False
) -> None:
    """Raise DoesNotFit unless all processes here have their device; `by_keys` ignores memory."""
    launch = current_launch()
    if launch and launch.is_own:  # what started it has looked, and the first may be loading by now
        return
    local = launch.local_world_size if launch else plan.frozen.hardware.num_processes
    misfits = key_misfits(plan, hardware) if by_keys else hardware_misfits(plan, hardware, local)
    require_fit((*misfits, *(() if launch else card_misfits(plan, hardware, local))))


def fetch_weights(plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan:
    """Download a hub's model and return the plan with its commit; a local one stays."""
    job = plan.job
    if not resolve.is_on_hub(job.model_ref):
        return plan
    may_change = plan.frozen.expected.evidence == "predicted"  # to settings that fit
    _require_machine(plan, hardware, by_keys=may_change)
    return with_job(plan, revision=resolve.fetch_model(job.model_ref).revision)


def _output_bytes(plan: TrainingPlan, model: ResolvedModel, epoch_size: int) -> int:
    """Size the adapter, its best state and all checkpoints, with the optimizer's state."""
    workload, job = plan.frozen.workload, plan.job
    transformer = build_on_meta(model.family, model.config)
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


# A predicted plan assumes the other keys until trials run on the machine.
PREDICTED_KEYS = ("device_kind", "compute_capability", "memory_kind")
# How much longer than planned a caption may be, as a share of the largest image's tokens:
# activations grow by less than that, and a plan leaves 2% of a GPU's memory free.
CAPTION_TOLERANCE = 0.01


def hardware_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why the plan cannot be trusted on this machine."""
    if foreign := _foreign_gpu(plan, hardware):
        return foreign
    local = num_processes or plan.frozen.hardware.num_processes
    memory = *_host_misfits(plan, hardware, local), *memory_misfits(plan, hardware, local)
    return (*key_misfits(plan, hardware), *_settings_misfits(plan, hardware), *memory)


def _foreign_gpu(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    # All else that differs follows from it.
    planned, name, here = plan.frozen.hardware, hardware.device.name, hardware.match_keys
    is_same_kind = all(planned.match_keys.get(key) == here.get(key) for key in PREDICTED_KEYS)
    if is_same_kind or planned.device_name == name:
        return ()
    if here.get("device_kind") == "cpu":
        made_for = f"the plan was made for {planned.device_name}"
        return (f"{made_for}, and this machine has no GPU that torch can use",)
    return (f"it was made for {planned.device_name}, not for {name}",)


def key_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """List why the machine is of another kind than the plan's, whatever its memory."""
    if foreign := _foreign_gpu(plan, hardware):
        return foreign
    planned = plan.frozen.hardware
    here = hardware.match_keys
    measured = plan.frozen.expected.evidence == "measured"
    formats = [plan.frozen.settings.quantization, plan.frozen.caching.text_encoder_quantization]
    formats += [fallback.quantization for fallback in plan.frozen.fallbacks]
    # The version of a library that no format needs is nothing.
    used = {WEIGHT_FORMATS[name].needs.library for name in formats if name in WEIGHT_FORMATS}
    idle = {each.needs.library for each in WEIGHT_FORMATS.values()} - used
    misfits = []
    for key, value in planned.match_keys.items():
        counts = key not in idle and (measured or key in PREDICTED_KEYS)
        if counts and here.get(key) != value:
            made, now = value or "none", here.get(key) or "none"
            name = KEY_NAMES.get(key, key)
            misfits.append(f"{name}: the plan was made with {made}, here it is {now}")
    return (*misfits, *_encoder_misfits(plan, hardware.device))


def _encoder_misfits(plan: TrainingPlan, device: Device) -> tuple[str, ...]:
    caching, planned = plan.frozen.caching, plan.frozen.hardware.encoder_gpu
    encoder, what = caching.other_gpu, caching.parts_on_other_gpu
    if encoder is None:
        return ()
    there = next((gpu for gpu in device.others if f"cuda:{gpu.index}" == encoder), None)
    if there is None:
        own = encoder == device.torch_name
        why = "which trains here" if own else f"this machine has {device.count} GPU(s)"
        return (f"GPUs: the plan encodes {what} on {encoder}, {why}",)
    if planned is None or planned.needed_bytes <= there.budget_bytes:
        return ()
    sizes = f"needs {_gib(planned.needed_bytes)}, {_gib(there.budget_bytes)} may be taken"
    return (f"GPUs: encoding {what} on {encoder}, {there.name}, {sizes}",)


def _settings_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    settings, encoder_format = plan.frozen.settings, plan.frozen.caching.text_encoder_quantization
    used = [(name, name, value) for name, value in settings if NAMES[name]]
    used.append(("text encoder quantization", "quantization", encoder_format))
    misfits = []
    for title, name, value in used:
        if reason := why_not_on(hardware.device.kind, hardware.lacks, name, value):
            misfits.append(f"{title}: {value} does not work on this machine: {reason}")
        elif value not in NAMES[name]:
            misfits.append(f"{title}: this version of autotune does not know {value!r}")
    family = FAMILIES.get(plan.frozen.workload.model.family)
    if family and (reason := why_not_cast(encoder_format, family)):
        unused = f"{encoder_format} is no longer used for {family.name}"
        misfits.append(f"text encoder quantization: {unused}: {reason}")
    return tuple(misfits)


def _host_misfits(plan: TrainingPlan, hardware: HardwareProfile, number: int) -> tuple[str, ...]:
    needed = number * (plan.frozen.expected.host_memory_bytes or 0)
    there = hardware.host.available_memory_bytes
    if needed <= there:
        return ()
    together = f" for {number} processes here" if number > 1 else ""
    have = f"{_gib(there)} are available"
    return (f"system RAM: the plan needs {_gib(needed)}{together}, {have}",)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def memory_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int
) -> tuple[str, ...]:
    """List why this device has too little memory; a CPU's is shared by `num_processes`."""
    needed = plan.frozen.expected.run_memory_bytes
    if plan.frozen.hardware.device_kind == "cpu":
        needed *= num_processes
    budget = hardware.device.budget_bytes
    if needed <= budget:
        return ()
    where = f"on cuda:{hardware.device.index}" if hardware.device.index else "here"
    sizes = f"the plan needs {_gib(needed)}, a run may take {_gib(budget)} {where}"
    return (f"run memory: {sizes}",)


def require_model(plan: TrainingPlan, model: ResolvedModel) -> None:
    """Raise DoesNotFit if the plan is not for a model of this architecture."""
    planned, given = plan.frozen.workload.model, model.spec
    if planned.architecture != given.architecture:
        what = f"the plan is for the architecture of {planned.name}, {given.name} has another"
        require_fit((f"model: {what}",))


def data_misfits(plan: TrainingPlan, context: TuningContext) -> tuple[str, ...]:
    """List why data with `context.workload` is outside the planned class."""
    planned, actual = plan.frozen.workload, context.workload
    misfits = []
    largest, allowed = actual.largest_bucket, planned.largest_bucket
    if largest.num_pixels > allowed.num_pixels:
        misfits.append(f"a bucket of {_size(largest)} is larger than the planned {_size(allowed)}")
    tolerance = int(CAPTION_TOLERANCE * context.family.tokens_per_frame(allowed))
    tokens, max_tokens = actual.max_text_tokens, planned.max_text_tokens
    if tokens > max_tokens + tolerance:
        misfits.append(f"a caption of {tokens} tokens is longer than the planned {max_tokens}")
    controls, max_controls = actual.num_control_images, planned.num_control_images
    if controls > max_controls:
        misfits.append(f"{controls} control images for an item, the plan is for {max_controls}")
    conflicts = (knob.why_not(plan.frozen.settings, context) for knob in KNOBS)
    misfits = [f"data: {misfit}" for misfit in (*misfits, *filter(None, conflicts))]
    share = planned.share(plan.frozen.hardware.num_processes).effective_batch_size
    if plan.frozen.settings.micro_batch_size > share:
        misfits.append(f"processes: each gets {share} image(s) per step, less than a micro-batch")
    return tuple(misfits)


def require_fit(misfits: tuple[str, ...]) -> None:
    """Raise DoesNotFit, naming all, if there are misfits."""
    if misfits:
        hint = "make one for this machine and data: `autotune plan --from` and this plan's file"
        raise DoesNotFit(f"the plan does not fit: {'; '.join(misfits)}", hint=hint)


def _size(bucket: Bucket) -> str:
    frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    return f"{bucket.width_px} x {bucket.height_px} px{frames}"


def device_misfits(num_processes: int, hardware: HardwareProfile) -> tuple[str, ...]:
    """List why so many processes cannot have an equal GPU each; on a CPU they share it."""
    kind = hardware.device.kind
    if num_processes == 1 or kind == "cpu":
        return ()
    if kind != "cuda":
        return (f"processes: {num_processes} need a GPU each, {kind} has one",)
    if (count := hardware.device.count) < num_processes:
        return (f"processes: {num_processes} need a GPU each, {count} can be seen here",)
    cards = [torch.cuda.get_device_properties(index) for index in range(num_processes)]
    kinds = {(card.name, card.total_memory // 2**30) for card in cards}
    if len(kinds) == 1:
        return ()
    names = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in kinds))
    return (f"processes: they need equal GPUs, the first {num_processes} are {names}",)


def card_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why any process but the first cannot have a GPU with enough memory."""
    planned = plan.frozen.hardware
    num_processes = num_processes or planned.num_processes
    if misfits := device_misfits(num_processes, hardware):
        return misfits
    if num_processes == 1 or hardware.device.kind != "cuda":
        return ()
    others = [index for index in range(num_processes) if index != hardware.device.index]
    found = [memory_misfits(plan, probe(index=index), planned.num_processes) for index in others]
    return tuple(chain.from_iterable(found))


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


def check_job(job: Job, family: Family, optimizer: OptimizerChoice) -> None:
    """Raise InvalidInput if the job lacks what an option needs, its family lacks the option, or its
    optimizer cannot learn at the rate."""
    usual = usual_learning_rate(optimizer, family.defaults.learning_rate)
    is_known, (low, high) = ":" not in optimizer.name, (usual / SANE_RATES, usual * SANE_RATES)
    if is_known and not low <= job.learning_rate <= high:
        raise InvalidInput(
            f"{optimizer.name} cannot learn at a learning rate of {job.learning_rate:g}",
            hint=f"usual is --learning-rate {usual:g}; {low:.3g} to {min(high, 1.0):.3g} are taken",
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
    return Bucket(width_px=width, height_px=height, num_frames=num_frames, num_items=USUAL_IMAGES)


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
    given = {name: value for name, value in request.given.items() if name in Learning.model_fields}
    rank = given.get("rank", defaults.rank)
    usual = {
        "rank": rank,
        "lora_alpha": defaults.lora_alpha * rank / defaults.rank,
        "effective_batch_size": defaults.effective_batch_size,
        "targets": request.targets,
    }
    sides = family.size_multiple_px, family.max_side_px
    buckets = (bucket,) if dataset is None else make_buckets(dataset.items, resolution, *sides)
    lengths = sorted(_text_lengths(model, dataset, buckets, request.text_tokens, drops_captions))
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
        **{**usual, **given},
    )


def _check_learning(model: ResolvedModel, request: WorkloadRequest) -> None:
    family, optimizer = model.family, request.optimizer_choice
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
    captions: list[str] = []
    controls: list[list[tuple[int, int]]] = []
    for item, index in zip(dataset.items, assign_buckets(dataset.items, buckets), strict=True):
        captions += item.captions
        controls += [[sizes[index]] * len(item.control_paths)] * len(item.captions)
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


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample from one prompt, each from a seed one higher than the last."""

    prompt: str
    count: int = 1
    seed: int = 0
    # None for the job's.
    num_steps: int | None = None
    control_paths: tuple[Path, ...] = ()
    # None for a file in the run's folder or beside the plan; several get numbers. A clip is an
    # .mp4; any other name gets its first frame as a PNG.
    output: Path | None = None


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
    require_writable(file)
    if file.suffix == ".mp4" and not has_video_decoder():
        message = "an mp4 is written with PyAV, which is not installed"
        raise InvalidInput(message, hint=INSTALL_VIDEO)
    if not adapter:
        require(plan)
    model = resolve.fetch_model(plan.job.model_ref)
    model.family.check_num_controls(len(request.control_paths), "the prompt")
    return SampleInputs(request, plan, model, adapter, file)
