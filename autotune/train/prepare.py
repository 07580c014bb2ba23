"""Checks before long work: a run's plan, machine, model, data and disk; what sampling takes."""

import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count, product
from pathlib import Path

from filelock import FileLock

from autotune.data.dataset import SplitDataset, read_split, slider_data
from autotune.data.items import make_options
from autotune.data.pixels import has_video_decoder
from autotune.errors import InvalidInput
from autotune.events import Notice, OnEvent
from autotune.knobs.knob import TuningContext
from autotune.knobs.settings import check_options, optimizer_bytes
from autotune.models import registry, resolve
from autotune.models.adapter import adapter_shapes, add_adapter
from autotune.models.family import build_on_meta
from autotune.models.resolve import ResolvedModel
from autotune.plan.base import log_event
from autotune.plan.file import RUN_PLAN_FILE, load_plan, with_job
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Workload, WorkloadRequest
from autotune.system import files, process
from autotune.system.lazy import torch
from autotune.train import fit, folder, metrics
from autotune.train.workload import check_format, check_job, describe_workload, require_even_shares
from autotune.weights.files import open_weights, read_header, weights_digest

INSTALL_VIDEO = "pip install 'lora-autotune[video]'"


@dataclass(frozen=True)
class RunInputs:
    """Checked inputs of a run; `model` is None while it is to be fetched from the hub."""

    data: SplitDataset
    model: ResolvedModel | None


def read_inputs(plan: TrainingPlan, *, resume: bool) -> RunInputs:
    """Check the job, the output folder and a local model, and read the data."""
    job, workload = plan.job, plan.frozen.workload
    if job.data is None and not job.slider:
        hint = "name one: autotune train plan.yaml --data FOLDER"
        raise InvalidInput("the plan names no data folder", hint=hint)
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
    check_format(job.adapter_format, model, planned)
    request, drops_captions = WorkloadRequest.again(planned), job.caption_dropout > 0
    workload = describe_workload(model, data.whole, request, drops_captions=drops_captions)
    misfits = fit.data_misfits(plan, TuningContext(hardware, model.family, workload))
    named = isinstance(job.data, str)
    fit.require_fit(misfits, f" --data {shlex.quote(str(job.data))}" if named else "")
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


# Of the files that `sample` writes, PNG and mp4: the facts in them say what made them.
MARKS = (b"software\0\0\0\0\0autotune ", b'"software": "autotune ')
MAX_STRENGTH = 10.0  # of an adapter: with more nothing is left of the picture


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample from one prompt, each from a seed one higher than the last."""

    prompt: str
    count: int = 1
    seed: int = 0
    num_steps: int | None = None  # None for the job's
    control_paths: tuple[Path, ...] = ()
    # None for free names in the run's `samples` or beside the plan; several get numbers. A clip is
    # an .mp4; any other name gets its first frame as a PNG.
    output: Path | None = None
    # Factors of the adapter's effect: 0 is the model as it is, 1 what was trained.
    strengths: tuple[float, ...] = (1.0,)

    def free(self, path: Path) -> Path:
        """Return where a picture is written: no name but a given one has a picture replaced."""
        names = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
        return next(name for name in names if self.output or not os.path.lexists(name))


@dataclass(frozen=True)
class SampleInputs:
    """A checked request with its run; without an adapter it shows the model as it is."""

    request: SampleRequest
    plan: TrainingPlan
    model: ResolvedModel
    adapter: Path | None
    paths: dict[tuple[int, float], Path]  # of pictures, by their number and strength


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
    if missing := [path for path in request.control_paths if not path.is_file()]:
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
    file = request.output or (run / "samples" if adapter else run.parent) / f"sample{suffix}"
    paths = dict[tuple[int, float], Path]()
    strengths = request.strengths if adapter else (1.0,)
    first, is_numbered = (1, request.count > 1) if request.output else (request.seed, True)
    for number, strength in product(range(request.count), strengths):
        name = f"{file.stem}-{first + number}" if is_numbered else file.stem
        name += f"-at-{strength:g}" if len(strengths) > 1 else ""
        paths[number, strength] = file.with_stem(name)
        files.require_writable(request.free(paths[number, strength]), *MARKS)
    if file.suffix == ".mp4" and not has_video_decoder():
        raise InvalidInput("an mp4 needs PyAV, which is not installed", hint=INSTALL_VIDEO)
    if not adapter:
        require(plan)
    model = resolve.fetch_model(plan.job.model_ref)
    model.family.check_prompt(len(request.control_paths))
    return SampleInputs(request, plan, model, adapter, paths)
