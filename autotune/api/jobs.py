"""`job_script`: a plan's run as a job file for a cluster."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from autotune.api.options import require_optimizer
from autotune.api.plan_files import load_plan
from autotune.data import is_list, list_places, make_options, scan_dataset
from autotune.errors import InvalidInput, suggest_nearest
from autotune.families import get_family, is_on_hub, is_single_file
from autotune.jobs import JobFile, JobNeeds, docker_script, kubernetes_manifest, slurm_script
from autotune.knobs import require_allowed
from autotune.runtime import write_text_atomic
from autotune.schema import (
    DataPlace,
    HardwareProfile,
    TrainingPlan,
    as_job_data,
    each_place,
    load_subjects,
    load_variants,
    with_job,
)

Cluster = Literal["slurm", "kubernetes", "docker"]
Overrides = dict[str, str | tuple[str, ...]]
"""Fields of the plan's job that are replaced."""


def job_script(
    plan: str | Path,
    cluster: Cluster,
    *,
    hardware: str | HardwareProfile | None = None,
    model: str | None = None,
    data: DataPlace | None = None,
    control: str | Path | None = None,
    output: str | Path | None = None,
    optimizer: str | None = None,
    over: str | Path | None = None,
    nodes: int | None = None,
    hours: float | None = None,
    image: str = "",
    claim: str = "",
    path: str | Path | None = None,
) -> str:
    """A plan's run as a job file: GPUs, host memory and time as the plan predicts, stopped and
    resumed by checkpoints.

    Relative paths of the job count from the current folder, which the job must find on every node.

    Args:
        plan, cluster: the plan's file, and what the job is for.
        hardware: of a file with variants, the machine that the job will run on: as for `load_plan`.
        model, data, control, output: as for `train`; data, and control images of models that edit,
            are needed if the plan names none.
        optimizer: the plan's `package:Class`, without which the job would not load such code.
        over: file that lists subjects, each of which one job of an array trains, into a folder of
            its own in `output`.
        nodes: number of machines that share the plan's processes; by default those that it was made
            for.
        hours: time limit of one start; by default half more than predicted.
        image, claim: container image with autotune in it, for Kubernetes and Docker; Kubernetes'
            persistent volume claim that holds the current folder.
        path: file to write the text to as well, in a folder that is there.

    Raises:
        InvalidPlan: the file is not a valid plan.
        DoesNotFit: none of several variants is for the hardware.
        InvalidInput: the cluster is unknown or needs more than was given, the job would lack data
            or folders, the nodes or the hours are too few, or `path` is the plan or cannot be
            written.

    Example:
        >>> print(autotune.job_script("plan.yaml", "slurm", nodes=2))
    """
    if cluster not in get_args(Cluster):
        raise InvalidInput(
            f"no job files for {cluster!r}", hint=suggest_nearest(cluster, get_args(Cluster))
        )
    file, given = Path(plan), {"model": model, "control": control, "output": output}
    overrides: Overrides = {name: str(value) for name, value in given.items() if value is not None}
    overrides |= {} if data is None else {"data": as_job_data(data)}
    made = with_job(_variant(file, hardware), **overrides)
    overrides |= _own_optimizer(made, optimizer)
    subjects = () if over is None else load_subjects(over)
    longest = _longest([subject.plan(made) for subject in subjects] or [made])
    job = _job_file(made, file, overrides, image, claim)
    if over is not None:  # the list's path as written, links and all
        job = replace(job, over=PurePosixPath(os.path.abspath(over)), num_subjects=len(subjects))  # noqa: PTH100
    write = {"slurm": slurm_script, "kubernetes": kubernetes_manifest, "docker": docker_script}[
        cluster
    ]
    text = write(JobNeeds.of_plan(longest, num_nodes=nodes, hours=hours), job)
    if path is not None:
        _write(Path(path), text, file)
    return text


def _own_optimizer(plan: TrainingPlan, named: str | None) -> dict[str, str]:
    """The plan's optimizer if it is code of the user's own, who must have named it."""
    require_optimizer(plan, named)
    planned = plan.frozen.workload.optimizer.name
    if ":" not in planned:
        return {}
    require_allowed(planned)
    return {"optimizer": planned}


def _longest(plans: Sequence[TrainingPlan]) -> TrainingPlan:
    """The one with most steps, epochs counted as such.

    Raises InvalidInput if the job of one would lack data or folders.
    """
    for plan in plans:
        _require_folders(plan)
    return max(map(_in_steps, plans), key=lambda plan: plan.job.num_steps)


def _in_steps(plan: TrainingPlan) -> TrainingPlan:
    """The plan with the steps that its epochs take: of the data, or of as many images as planned
    if it is not here.
    """
    job, work = plan.job, plan.frozen.workload
    if job.num_train_epochs is None or job.data is None:
        return plan
    images = 0
    if all(Path(place).exists() for place in each_place(job.data)):
        options = make_options(dict(job), get_family(work.model.family), job.num_frames)
        images = scan_dataset(job.data, options, verify_seconds=0).epoch_size
    images = images or sum(bucket.num_items for bucket in work.buckets)
    return with_job(plan, num_steps=max(1, job.steps_on(images, work.effective_batch_size)))


def _variant(file: Path, hardware: str | HardwareProfile | None) -> TrainingPlan:
    variants = load_variants(file)
    if (
        len(variants) > 1 and hardware is None
    ):  # this machine, such as a login node, is not where the job will run
        names = ", ".join(variant.frozen.hardware.device_name for variant in variants)
        raise InvalidInput(
            f"{file} has variants for several machines: {names}",
            hint="say which one the job will run on: --hardware NAME",
        )
    return load_plan(file, hardware=hardware)


def _require_folders(plan: TrainingPlan) -> None:
    if plan.job.data is None:
        raise InvalidInput(
            "the plan names no data folder",
            hint="name the one that the job shall read: --data FOLDER",
        )
    if plan.frozen.workload.num_control_images and plan.job.control is None:
        raise InvalidInput(
            "the plan's model edits images, but the plan names no folder of control images",
            hint="name the one that the job shall read: --control FOLDER",
        )


def _job_file(
    plan: TrainingPlan, file: Path, overrides: Overrides, image: str, claim: str
) -> JobFile:
    """The job with all places that it needs."""
    job, folder = plan.job, Path.cwd()
    model = os.path.expanduser(job.model)  # noqa: PTH111  as the run will; the home of a container is another
    taken = ("model", "data", "control", "optimizer")
    options = {name: overrides[name] for name in taken if name in overrides}
    if model != job.model:
        options["model"] = model
    data = each_place(job.data or ())
    read = [name for name in (*data, job.control, job.validation_folder) if name]
    for place in data:
        if is_list(place) and Path(place).is_file():
            read += list_places(place)
    if is_single_file(model) or not is_on_hub(model) or model.startswith(("/", "./", "../")):
        read.append(model)
    read += [name for name in (job.vae, *job.text_encoders) if name]
    if job.base and not is_on_hub(job.base):
        read.append(job.base)
    written = [job.output]
    if plan.frozen.expected.evidence == "measured":
        read.append(str(file))
    else:  # the run writes the measured plan beside it
        written.append(str(file.parent))
    return JobFile(
        folder=PurePosixPath(folder),
        plan_file=PurePosixPath(folder / file),
        output=PurePosixPath(folder / job.output),
        image=image,
        claim=claim,
        overrides=tuple(word for name, each in options.items() for word in _option(name, each)),
        reads=_places(read),
        writes=_places(written),
    )


def _option(name: str, value: str | tuple[str, ...]) -> list[str]:
    """An option's words; one of several values is repeated."""
    return [word for one in each_place(value) for word in (f"--{name}", one)]


def _places(names: Sequence[str]) -> tuple[PurePosixPath, ...]:
    """Absolute paths: as they are named, and where links lead to."""
    return tuple(
        PurePosixPath(find(name)) for name in names for find in (os.path.abspath, os.path.realpath)
    )


def _write(path: Path, text: str, plan: Path) -> None:
    if path.exists() and path.samefile(plan):
        raise InvalidInput(
            f"{path} is the plan itself", hint="name another file for the job: -o FILE"
        )
    if not path.parent.is_dir():
        raise InvalidInput(
            f"there is no folder {path.parent}", hint="make it first, or name another file: -o FILE"
        )
    try:
        write_text_atomic(path, text)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written: {error.strerror}", hint="name another file: -o FILE"
        ) from error
