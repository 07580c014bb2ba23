"""`job_script`: a plan's run as a job file for a cluster."""

from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from autotune.errors import InvalidInput, suggest_nearest
from autotune.jobs import JobFile, JobNeeds, docker_script, kubernetes_manifest, slurm_script
from autotune.schema import read_plan

Cluster = Literal["slurm", "kubernetes", "docker"]


def job_script(
    plan: str | Path,
    cluster: Cluster,
    *,
    nodes: int = 1,
    hours: float | None = None,
    image: str = "",
    claim: str = "",
) -> str:
    """A plan's run as a job file: GPUs, host memory and time as the plan predicts, stopped and resumed by checkpoints.

    Relative paths of the job count from the current folder, which the job must find on every node.

    Args:
        plan: the plan's file.
        cluster: what the job is for.
        nodes: number of machines that share the plan's processes.
        hours: time limit of one start; by default half more than predicted.
        image: container image with autotune in it, for Kubernetes and Docker.
        claim: Kubernetes' persistent volume claim that holds the current folder.

    Raises:
        InvalidPlan: the file is not a valid plan.
        InvalidInput: the cluster is unknown or needs more than was given, or the nodes or the hours are too few.

    Example:
        >>> print(autotune.job_script("plan.yaml", "slurm", nodes=2))
    """
    if cluster not in get_args(Cluster):
        raise InvalidInput(f"no job files for {cluster!r}", hint=suggest_nearest(cluster, get_args(Cluster)))
    made = read_plan(Path(plan))
    folder = Path.cwd()
    job = JobFile(
        folder=PurePosixPath(folder),
        plan_file=PurePosixPath(folder / plan),
        output=PurePosixPath(folder / made.job.output),
        image=image,
        claim=claim,
    )
    write = {"slurm": slurm_script, "kubernetes": kubernetes_manifest, "docker": docker_script}[cluster]
    return write(JobNeeds.of_plan(made, num_nodes=nodes, hours=hours), job)
