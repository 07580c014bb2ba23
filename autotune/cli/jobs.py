"""`autotune job-script` writes a plan's run as a job file for a cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

import autotune
from autotune.cli.options import Control, Data, PlanFile, PlansOptimizer


def job_script(
    plan_file: PlanFile,
    cluster: Annotated[str, typer.Option("--for", help="slurm, kubernetes or docker.", metavar="CLUSTER")],
    hardware: Annotated[
        str | None, typer.Option(help="Of a plan with variants, the machine that the job will run on, e.g. 4090.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same architecture from another folder.")] = None,
    data: Data = None,
    control: Control = None,
    run_output: Annotated[str | None, typer.Option(help="Output folder that the job will write.")] = None,
    optimizer: PlansOptimizer = None,
    over: Annotated[
        Path | None, typer.Option(help="For SLURM: an array of jobs, one for each subject in FILE.", metavar="FILE")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines that share the plan's processes; the plan's by default.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, max=1e5, help="Time limit of one start; 1.5x the prediction by default.")
    ] = None,
    image: Annotated[str, typer.Option(help="Container image with autotune in it.")] = "",
    claim: Annotated[str, typer.Option(help="Kubernetes' volume claim that holds this folder.")] = "",
    path: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout by default.")] = None,
) -> None:
    """Write a job file for a cluster: GPUs, memory and time as the plan predicts, resumed by checkpoints."""
    known: Any = cluster
    text = autotune.job_script(
        plan_file, known, hardware=hardware, model=model, data=data, control=control, output=run_output,
        optimizer=optimizer, over=over, nodes=nodes, hours=hours, image=image, claim=claim, path=path,
    )  # fmt: skip
    if path is None:
        typer.echo(text, nl=False)
