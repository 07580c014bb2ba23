"""What a run reads: output folder, model folder and data. What is wrong with them is told before
torch is imported.
"""

from dataclasses import dataclass
from pathlib import Path

from autotune.data import SplitDataset, make_options, read_split
from autotune.errors import InvalidInput
from autotune.families import ResolvedModel, check_weights, get_family, is_fetchable, resolve_model
from autotune.knobs import check_options
from autotune.schema import TrainingPlan
from autotune.training.describe import check_job, require_even_shares
from autotune.training.folder import check_folder, require_separate_output
from autotune.training.metrics import require_tracker
from autotune.weights import read_header


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
    Errors as in `train`.
    """
    model = resolve_model(plan.job.model_ref)
    check_weights(model)
    return model
