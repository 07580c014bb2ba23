"""Checks before a run's long work: plan, machine, model, data, output folder and disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from autotune.data.dataset import SplitDataset, read_split
from autotune.data.items import make_options
from autotune.errors import DoesNotFit, InvalidInput
from autotune.knobs.caching import cast_refusal
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.optimizer import check_options, optimizer_bytes
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.machine.probe import probe
from autotune.models.adapter import adapter_shapes, add_adapter
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import (
    ResolvedModel,
    check_weights,
    fetch_model,
    is_fetchable,
    is_on_hub,
    resolve_model,
)
from autotune.plan.file import with_job
from autotune.plan.hardware import KEY_NAMES, Device, HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Bucket, ModelSpec, Workload, WorkloadRequest
from autotune.system.lazy import lazy_module
from autotune.system.process import current_launch
from autotune.train.adapter_file import starting_values
from autotune.train.folder import check_folder, claim_folder, require_separate_output
from autotune.train.workload import check_job, describe_workload, require_even_shares
from autotune.weights.files import open_weights, read_header, weights_digest

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, checked; `model` is None while it is to be fetched from the hub."""

    data: SplitDataset
    model: ResolvedModel | None


def read_inputs(plan: TrainingPlan, *, resume: bool) -> RunInputs:
    """Check the job, the output folder and a local model, and read the data, before anything slow.

    Raises InvalidInput or AutotuneError.
    """
    from autotune.train.metrics import require_tracker

    job, workload = plan.job, plan.frozen.workload
    if job.data is None:
        raise InvalidInput(
            "the plan names no data folder", hint="name one: autotune train plan.yaml --data FOLDER"
        )
    require_even_shares(workload.effective_batch_size, plan.frozen.hardware.num_processes)
    require_tracker(job.report_to)
    family = get_family(workload.model.family)
    check_job(job, family.with_expert(job.expert))
    require_separate_output(job)
    check_folder(plan, resume=resume)
    if job.from_adapter is not None:
        read_header(Path(job.from_adapter))
    model = None if is_fetchable(job.model_ref) else read_model(plan)
    data = read_split(
        job.data, make_options(dict(job), family, job.num_frames), job.validation, job.seed
    )
    check_options(workload.optimizer)  # which imports that of another name
    return RunInputs(data, model)


def read_model(plan: TrainingPlan) -> ResolvedModel:
    """Resolve the plan's model and read the headers of all its weights."""
    model = resolve_model(plan.job.model_ref)
    check_weights(model)
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
    """Check everything that can fail before any long work.

    Raises DoesNotFit, InvalidInput or AutotuneError.
    """
    from autotune.train.checkpoint import require_same_weights

    _require_machine(plan, hardware)
    inputs = inputs or read_inputs(plan, resume=resume)
    data, model = inputs.data, inputs.model or read_model(plan)
    job, planned = plan.job, plan.frozen.workload
    require_fit(model_misfits(plan, model.spec))
    workload = describe_workload(
        model, data.whole, WorkloadRequest.again(planned), drops_captions=job.caption_dropout > 0
    )
    require_fit(data_misfits(plan, TuningContext(hardware, model.family, workload)))
    weights = weights_digest(open_weights(model.transformer_file))
    if resume:
        require_same_weights(Path(job.output), weights)
    needed_bytes = _output_bytes(plan, model, data.training.epoch_size)
    launch = current_launch()
    is_first = launch is None or launch.rank == 0  # which locks it for all processes
    lock = claim_folder(plan, resume=resume, needed_bytes=needed_bytes, lock=is_first)
    return PreparedRun(model, data, workload, Path(job.output), lock, weights)


def _require_machine(
    plan: TrainingPlan, hardware: HardwareProfile, *, by_keys: bool = False
) -> None:
    """Raise DoesNotFit unless all processes of this machine have their device.

    `by_keys` ignores memory. One of autotune's own processes skips this: what started it has
    looked, and by now the first may be loading.
    """
    launch = current_launch()
    if launch and launch.is_own:
        return
    local = launch.local_world_size if launch else plan.frozen.hardware.num_processes
    misfits = key_misfits(plan, hardware) if by_keys else hardware_misfits(plan, hardware, local)
    require_fit((*misfits, *(() if launch else card_misfits(plan, hardware, local))))


def fetch_weights(plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan:
    """Download a hub's model and return the plan with its commit; a local one stays."""
    job = plan.job
    if not is_on_hub(job.model_ref):
        return plan
    may_change = plan.frozen.expected.evidence == "predicted"  # to settings that fit
    _require_machine(plan, hardware, by_keys=may_change)
    return with_job(plan, revision=fetch_model(job.model_ref).revision)


def _output_bytes(plan: TrainingPlan, model: ResolvedModel, epoch_size: int) -> int:
    """Size the adapter, its best state and all checkpoints, with the optimizer's state."""
    workload, job = plan.frozen.workload, plan.job
    transformer = build_on_meta(model.family, model.config)
    shapes = adapter_shapes(model.family, transformer, workload)
    adapter_bytes = sum(math.prod(shape) * count for shape, count in shapes.items()) * 4
    if job.from_adapter is not None:  # before any long work
        add_adapter(model.family, transformer, workload, torch.float32)
        starting_values(Path(job.from_adapter), transformer, model.family)
    num_steps = job.steps_on(epoch_size, workload.effective_batch_size)
    num_permanent = job.checkpoints_keep_every and num_steps // max(
        1,
        job.checkpoint_every(epoch_size, workload.effective_batch_size)
        * job.checkpoints_keep_every,
    )
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
    memory = (
        *_host_misfits(plan, hardware, num_processes),
        *memory_misfits(plan, hardware, num_processes),
    )
    return (*key_misfits(plan, hardware), *_settings_misfits(plan, hardware), *memory)


def key_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """List why the machine is of another kind than the plan's, whatever its memory."""
    planned = plan.frozen.hardware
    here = hardware.match_keys
    measured = plan.frozen.expected.evidence == "measured"
    used = (plan.frozen.settings.quantization, plan.frozen.caching.text_encoder_quantization)
    stored = (*used, *(fallback.quantization for fallback in plan.frozen.fallbacks))
    libraries = {
        name: each.needs.library for name, each in WEIGHT_FORMATS.items() if each.needs.library
    }
    idle = {*libraries.values()} - {
        libraries.get(name) for name in stored
    }  # their versions are nothing
    misfits = [
        (
            f"{KEY_NAMES.get(key, key)}: the plan was made with {value or 'none'}, here it is "
            f"{here.get(key) or 'none'}"
        )
        for key, value in planned.match_keys.items()
        if key not in idle and here.get(key) != value and (measured or key in PREDICTED_KEYS)
    ]
    return (*misfits, *_encoder_misfits(plan, hardware.device))


def _encoder_misfits(plan: TrainingPlan, device: Device) -> tuple[str, ...]:
    caching, planned = plan.frozen.caching, plan.frozen.hardware.encoder_gpu
    encoder, what = caching.other_gpu, caching.parts_on_other_gpu
    if encoder is None:
        return ()
    there = next((gpu for gpu in device.others if f"cuda:{gpu.index}" == encoder), None)
    if there is None:
        why = (
            "which trains here"
            if encoder == device.torch_name
            else f"this machine has {device.count} GPU(s)"
        )
        return (f"GPUs: the plan encodes {what} on {encoder}, {why}",)
    if planned is None or planned.needed_bytes <= there.budget_bytes:
        return ()
    needed, left = planned.needed_bytes / 2**30, there.budget_bytes / 2**30
    return (
        f"GPUs: encoding {what} on {encoder}, {there.name}, needs {needed:.2f} GiB, {left:.2f} GiB "
        "may be taken",
    )


def _settings_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    settings, encoder_format = plan.frozen.settings, plan.frozen.caching.text_encoder_quantization
    used = [(name, name, value) for name, value in settings if NAMES[name]]
    used.append(("text encoder quantization", "quantization", encoder_format))
    misfits = []
    for title, name, value in used:
        if reason := why_not_on(name, value, hardware):
            misfits.append(f"{title}: {value} does not work on this machine: {reason}")
        elif value not in NAMES[name]:
            misfits.append(f"{title}: this version of autotune does not know {value!r}")
    family = FAMILIES.get(plan.frozen.workload.model.family)
    if family and (reason := cast_refusal(encoder_format, family)):
        misfits.append(
            f"text encoder quantization: {encoder_format} is no longer used for {family.name}: "
            f"{reason}"
        )
    return tuple(misfits)


def _host_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None
) -> tuple[str, ...]:
    number = num_processes or plan.frozen.hardware.num_processes
    needed, there = (
        number * (plan.frozen.expected.host_memory_bytes or 0),
        hardware.host.available_memory_bytes,
    )
    if needed <= there:
        return ()
    together = f" for {number} processes here" if number > 1 else ""
    have = f"{there / 2**30:.2f} GiB are available"
    return (f"host memory: the plan needs {needed / 2**30:.2f} GiB{together}, {have}",)


def memory_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why this device has too little memory; a CPU's is shared by `num_processes`."""
    planned = plan.frozen.hardware
    needed = plan.frozen.expected.run_memory_bytes
    if planned.device_kind == "cpu":
        needed *= num_processes or planned.num_processes  # they share it
    budget = hardware.device.budget_bytes
    if needed <= budget:
        return ()
    where = f"on cuda:{hardware.device.index}" if hardware.device.index else "here"
    return (
        f"run memory: the plan needs {needed / 2**30:.2f} GiB, a run may take {budget / 2**30:.2f} "
        f"GiB {where}",
    )


def model_misfits(plan: TrainingPlan, model: ModelSpec) -> tuple[str, ...]:
    """List why the plan is not for this model: only the architecture matters."""
    planned = plan.frozen.workload.model
    if planned.architecture == model.architecture:
        return ()
    return (f"model: the plan is for the architecture of {planned.name}, {model.name} has another",)


def data_misfits(plan: TrainingPlan, context: TuningContext) -> tuple[str, ...]:
    """List why data with `context.workload` is outside the planned class."""
    planned, actual = plan.frozen.workload, context.workload
    misfits = []
    largest, allowed = actual.largest_bucket, planned.largest_bucket
    if largest.num_pixels > allowed.num_pixels:
        misfits.append(
            f"data: a bucket of {_size(largest)} is larger than the planned {_size(allowed)}"
        )
    tolerance = int(CAPTION_TOLERANCE * context.family.tokens_per_frame(allowed))
    if actual.max_text_tokens > planned.max_text_tokens + tolerance:
        misfits.append(
            f"data: a caption of {actual.max_text_tokens} tokens is longer than the planned "
            f"{planned.max_text_tokens}"
        )
    controls = actual.num_control_images
    if controls > planned.num_control_images:
        misfits.append(
            f"data: {controls} control images for an item, the plan is for "
            f"{planned.num_control_images}"
        )
    conflicts = (knob.why_not(plan.frozen.settings, context) for knob in KNOBS)
    misfits += [f"data: {conflict}" for conflict in conflicts if conflict]
    share = planned.share(plan.frozen.hardware.num_processes).effective_batch_size
    if plan.frozen.settings.micro_batch_size > share:
        misfits.append(f"processes: each gets {share} image(s) per step, less than a micro-batch")
    return tuple(misfits)


def require_fit(misfits: tuple[str, ...]) -> None:
    """Raise DoesNotFit, naming all, if there are misfits."""
    if misfits:
        raise DoesNotFit(
            f"the plan does not fit: {'; '.join(misfits)}",
            hint="make one for this machine and data: autotune plan --from PLAN",
        )


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
    if hardware.device.count < num_processes:
        return (
            f"processes: {num_processes} need a GPU each, {hardware.device.count} can be seen here",
        )
    cards = [torch.cuda.get_device_properties(index) for index in range(num_processes)]
    kinds = {(card.name, card.total_memory // 2**30) for card in cards}
    names = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in kinds))
    return (
        (f"processes: they need equal GPUs, the first {num_processes} are {names}",)
        if len(kinds) > 1
        else ()
    )


def card_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why any process but the first cannot have a GPU with enough memory."""
    planned = plan.frozen.hardware
    num_processes = num_processes or planned.num_processes
    if misfits := device_misfits(num_processes, hardware):
        return misfits
    others = range(num_processes if num_processes > 1 and hardware.device.kind == "cuda" else 0)
    own = hardware.device.index  # which `memory_misfits` has looked at
    return tuple(
        misfit
        for index in others
        if index != own
        for misfit in memory_misfits(plan, probe(index=index))
    )
