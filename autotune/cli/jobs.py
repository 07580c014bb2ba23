"""`autotune job-script` writes a plan's run as a job file for a cluster."""

from dataclasses import dataclass
from pathlib import Path

import typer

import autotune
from autotune.cli.options import REQUIRED, Data, PlanFile, PlansOptimizer, given, option, takes


@dataclass(frozen=True, kw_only=True)
class JobScriptOptions:
    """What `autotune job-script` can be asked; the names are those of `autotune.job_script`.
    None: not given.
    """

    plan: PlanFile
    cluster: str = option(
        "slurm, kubernetes or docker.", "--for", default=REQUIRED, metavar="CLUSTER"
    )
    hardware: str | None = option(
        "Of a plan with several variants, the machine that the job will run on, e.g. 4090."
    )
    model: str | None = option("The same architecture from another folder.")
    data: Data = None
    control: Path | None = option("Folder of control images, for edit models.")
    output: str | None = option("Output folder that the job will write.", "--run-output")
    optimizer: PlansOptimizer = None
    over: Path | None = option(
        "For SLURM: an array of jobs, one for each subject in FILE.", metavar="FILE"
    )
    nodes: int | None = option(
        "Machines that share the plan's processes; the plan's by default.", min=1
    )
    hours: float | None = option(
        "Time limit of one start; by default 1.5x the prediction.", min=0, max=1e5
    )
    image: str = option("Container image with autotune in it.", default="")
    claim: str = option("Kubernetes' volume claim that holds this folder.", default="")
    path: Path | None = option("File to write; stdout by default.", "-o", "--output")


@takes(JobScriptOptions)
def job_script(options: JobScriptOptions) -> None:
    """Write a job file for a cluster: GPUs, memory and time as the plan predicts, resumed by
    checkpoints.
    """
    text = autotune.job_script(**given(options))
    if options.path is None:
        typer.echo(text, nl=False)
