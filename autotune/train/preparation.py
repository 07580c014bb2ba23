"""Everything that is checked before a run's long work: plan, machine, model, data, output folder
and disk."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from autotune.data.dataset import SplitDataset, read_split
from autotune.data.items import make_options
from autotune.errors import InvalidInput
from autotune.knobs.knob import TuningContext
from autotune.knobs.optimizer import check_options, optimizer_bytes
from autotune.models.adapter import adapter_shapes, add_adapter
from autotune.models.family import build_on_meta
from autotune.models.registry import get_family
from autotune.models.resolve import (
    ResolvedModel,
    check_weights,
    fetch_model,
    is_fetchable,
    is_on_hub,
    resolve_model,
)
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import with_job
from autotune.plan.workload import Workload
from autotune.system.process import current_launch
from autotune.train.adapter_file import starting_values
from autotune.train.checkpoint import require_same_weights
from autotune.train.describe import (
    check_job,
    describe_workload,
    overrides_from,
    require_even_shares,
)
from autotune.train.fit import (
    data_misfits,
    hardware_misfits,
    key_misfits,
    model_misfits,
    require_fit,
)
from autotune.train.folder import check_folder, claim_folder, require_separate_output
from autotune.train.metrics import require_tracker
from autotune.train.processes import card_misfits
from autotune.weights.files import open_weights, read_header, weights_digest


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, found sound."""

    data: SplitDataset
    model: ResolvedModel | None
    """None while it is to be fetched from the hub."""


def read_inputs(plan: TrainingPlan, *, resume: bool) -> RunInputs:
    """Check the job, the output folder and a local model's files, and read the data: before the
    machine is looked at, weights are fetched and a predicted plan is tried.

    Raises:
        InvalidInput, AutotuneError: as in `train`.
    """
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
    """The plan's model, whose files are on this machine: the headers of all weights are read.
    Errors as in `train`."""
    model = resolve_model(plan.job.model_ref)
    check_weights(model)
    return model


@dataclass(frozen=True)
class PreparedRun:
    """The checked inputs and the output folder of a run."""

    model: ResolvedModel
    data: SplitDataset
    workload: Workload
    output: Path
    lock: FileLock
    """Held on the output folder until the run ends."""
    weights: str
    """Digest of the transformer's weights."""


def prepare(
    plan: TrainingPlan, hardware: HardwareProfile, *, resume: bool, inputs: RunInputs | None = None
) -> PreparedRun:
    """Check plan, machine, model, data, output folder and disk: everything that can fail before any
    long work.

    `inputs` are what `read_inputs` has read already.

    Raises:
        DoesNotFit, InvalidInput, AutotuneError: as in `train`.
    """
    _require_machine(plan, hardware)
    inputs = inputs or read_inputs(plan, resume=resume)
    data, model, job, planned = (
        inputs.data,
        inputs.model or read_model(plan),
        plan.job,
        plan.frozen.workload,
    )
    require_fit(model_misfits(plan, model.spec))
    workload = describe_workload(
        model, data.whole, overrides_from(planned), drops_captions=job.caption_dropout > 0
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
    """Raise DoesNotFit unless all processes of this machine have their device; `by_keys` alone,
    whatever its memory.

    A process that another launcher started looks at its own device, before it meets the others and
    any takes memory. One of autotune's own skips this: what started it has looked, and by now the
    first may be loading.
    """
    launch = current_launch()
    if launch and launch.is_own:
        return
    local = launch.local_world_size if launch else plan.frozen.hardware.num_processes
    misfits = key_misfits(plan, hardware) if by_keys else hardware_misfits(plan, hardware, local)
    require_fit((*misfits, *(() if launch else card_misfits(plan, hardware, local))))


def fetch_weights(plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan:
    """Download a hub's model, with progress bars; the plan returned names the commit.

    Nothing is downloaded for a local folder.

    Raises:
        DoesNotFit: the plan was made for another machine.
        BadWeights: the repository does not exist, its license is not accepted, or offline files are
            missing.
    """
    job = plan.job
    if not is_on_hub(job.model_ref):
        return plan
    may_change = plan.frozen.expected.evidence == "predicted"  # to settings that fit
    _require_machine(plan, hardware, by_keys=may_change)
    return with_job(plan, revision=fetch_model(job.model_ref).revision)


def _output_bytes(plan: TrainingPlan, model: ResolvedModel, epoch_size: int) -> int:
    """Size of the adapter, also where it was best, and all checkpoints: fp32 weights, in a
    checkpoint with the optimizer's state and the average of steps."""
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
