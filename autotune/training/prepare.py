"""All that is checked before a run's long work: plan, machine, model, data, output folder, disk."""

from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.errors import InvalidInput
from autotune.families.adapter import add_adapter
from autotune.families.resolve import ResolvedModel, build_on_meta, resolve_model
from autotune.fit import data_misfits, hardware_misfits, model_misfits, require_fit
from autotune.knobs.base import Setting
from autotune.schema import HardwareProfile, TrainingPlan, Workload
from autotune.training.data.dataset import Dataset, read_dataset
from autotune.training.describe import describe_workload, require_even_shares, wishes_of
from autotune.training.folder import claim_folder
from autotune.training.processes import device_misfits
from autotune.weights.sources import open_source


@dataclass(frozen=True)
class Prepared:
    """What a run stands on, all of it checked."""

    model: ResolvedModel
    dataset: Dataset
    workload: Workload
    output: Path


def prepare(plan: TrainingPlan, hardware: HardwareProfile, *, resume: bool) -> Prepared:
    """Check plan, machine, model, data, output folder and disk: all that can fail before any long work.

    Raises:
        DoesNotFit, InvalidInput, AutotuneError: as `train`.
    """
    processes = plan.frozen.hardware.num_processes
    require_fit((*hardware_misfits(plan, hardware), *device_misfits(processes, hardware)))
    job, planned = plan.job, plan.frozen.workload
    if job.data is None:
        raise InvalidInput("the plan names no data folder", hint="name one: autotune train plan.yaml --data FOLDER")
    require_even_shares(planned, processes)
    model = resolve_model(job.model)
    require_fit(model_misfits(plan, model.spec))
    _require_weights(model)
    dataset = read_dataset(
        Path(job.data),
        caption=job.caption,
        trigger=job.trigger,
        control=Path(job.control) if job.control else None,
        num_frames=job.num_frames,
    )
    workload = describe_workload(model, dataset, wishes_of(planned))
    require_fit(data_misfits(plan, Setting(hardware, model.family, workload)))
    output = claim_folder(plan, resume=resume, needed_bytes=_output_bytes(plan, model))
    return Prepared(model, dataset, workload, output)


def _require_weights(model: ResolvedModel) -> None:
    """Read the headers of all components: damage shows now, not after an hour of caching."""
    if model.folder is None:
        raise InvalidInput(
            f"the weights of {model.spec.name} are not on this machine",
            hint=f"download {model.family.hub_id} and pass its folder: --model FOLDER",
        )
    for part in model.family.components:
        if part in ("transformer", "vae") or part.startswith("text_encoder"):
            open_source(model.folder / part)


def _output_bytes(plan: TrainingPlan, model: ResolvedModel) -> int:
    """Of the adapter and all checkpoints: fp32 weights, and with two moments for each in a checkpoint."""
    workload, job = plan.frozen.workload, plan.job
    adapter = add_adapter(
        model.family,
        build_on_meta(model.family, model.config),
        rank=workload.rank,
        lora_alpha=workload.lora_alpha,
        targets=workload.targets,
        dtype=torch.float32,
    )
    one = sum(parameter.numel() for parameter in adapter) * 4
    kept = job.checkpoints_keep_every and job.num_steps // max(1, job.checkpointing_steps * job.checkpoints_keep_every)
    return one * (1 + 3 * (job.checkpoints_total_limit + 1 + kept))
