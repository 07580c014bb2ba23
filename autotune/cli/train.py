"""`autotune train` runs a plan; `autotune sample` shows what came of it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Data, JobOptions, Json, PlanFile, takes, tell

if TYPE_CHECKING:
    from autotune.schema import HardwareProfile, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `autotune train` can be told beside the job."""

    plan_file: PlanFile
    model: Annotated[str | None, typer.Option(help="The same architecture from another folder.")] = None
    data: Data = None
    output: Annotated[str | None, typer.Option(help="Folder for the adapter, samples and report.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")] = False
    trace: Annotated[bool, typer.Option("--trace", help="Write a profile of a few steps to trace.json.")] = False
    as_json: Json = False


@takes(TrainOptions, JobOptions)
def train(asked: TrainOptions, job: JobOptions) -> None:
    """Train exactly what a plan says; options override its job."""
    from autotune.schema import read_plan, with_job

    chosen = with_job(
        read_plan(asked.plan_file), model=asked.model, data=asked.data, output=asked.output, **job.values()
    )
    from autotune.cli.terminal import err

    with err.status("reading the machine"):
        from autotune.hardware import held_for_run
        from autotune.hardware import probe as read_machine
        from autotune.runtime import forget_other_launchers, launch, silence_progress_bars, started_by_launcher
        from autotune.training import checkpoints_of, fetch_weights, prepare

        forget_other_launchers()
        silence_progress_bars()
        hardware = read_machine()
    chosen = _measured_here(asked.plan_file, fetch_weights(chosen, hardware), hardware)
    number = chosen.frozen.hardware.num_processes
    with held_for_run(hardware.device, number, err.print):
        if number > 1 and not started_by_launcher():
            prepare(chosen, hardware, resume=asked.resume).lock.release()  # so that what is wrong is said once
            raise typer.Exit(launch(number, sys.argv[1:], lambda: checkpoints_of(Path(chosen.job.output))))
        _run(chosen, hardware, resume=asked.resume, trace=asked.trace, as_json=asked.as_json)


def _run(plan: "TrainingPlan", hardware: "HardwareProfile", *, resume: bool, trace: bool, as_json: bool) -> None:
    """Train in this process; the first of several tells about it."""
    from autotune.cli.terminal import err, show_events
    from autotune.reporting import job_line, report_lines
    from autotune.runtime import is_first_process
    from autotune.training import train as run

    if is_first_process():
        err.print(job_line(plan))
    with show_events() as show:
        report = run(plan, hardware, _cache_folder(), show, resume=resume, trace=trace)
    if not is_first_process():
        return
    adapter = f"adapter: {Path(plan.job.output) / report.adapter}"
    tell(report, as_json, lambda _: [*report_lines(report), adapter])


def _measured_here(path: Path, plan: "TrainingPlan", hardware: "HardwareProfile") -> "TrainingPlan":
    """The plan, or where it was predicted the measured one that a trial on this machine makes of it."""
    if plan.frozen.expected.evidence == "measured" or plan.frozen.hardware.strategy == "fsdp2":
        return plan  # a trial has one device, and cannot hold what is shared out
    from autotune.cli.terminal import err
    from autotune.planning import seal_on_arrival, sealed_beside, sealed_path
    from autotune.runtime import started_by_launcher

    known = sealed_beside(path, plan, hardware)
    if known is not None or started_by_launcher():
        return known or plan
    with err.status("the plan was predicted: one trial tells whether it holds here"):
        sealed = seal_on_arrival(path, plan, hardware)
    then, now = plan.frozen.expected, sealed.frozen.expected
    changed = "" if sealed.frozen.settings == plan.frozen.settings else "; its settings did not run, a fallback does"
    err.print(
        f"measured here: {now.step_seconds:.3g} s per step, {then.step_seconds:.3g} predicted{changed}; "
        f"written to {sealed_path(path)}",
    )
    return sealed


def sample(
    run_folder: Annotated[Path, typer.Argument(help="Output folder of a training run.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="What to show.")],
    count: Annotated[int, typer.Option(min=1, help="Pictures, each from another seed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of the first picture.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; the plan's by default.")] = None,
    control: Annotated[
        list[Path] | None, typer.Option(help="Control image of an edit model; repeat for more.", metavar="FILE")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="PNG file; in RUN by default.")] = None,
) -> None:
    """Sample from a trained adapter, through the model's stock pipeline."""
    from autotune.cli.terminal import out, show_events
    from autotune.hardware import probe as read_machine
    from autotune.runtime import silence_progress_bars
    from autotune.training import SampleRequest, sample_run

    silence_progress_bars()
    wanted = SampleRequest(prompt, count, seed, steps, tuple(control or ()), output)
    with show_events() as show:
        written = sample_run(run_folder, read_machine(), wanted, _cache_folder(), show)
    for path in written:
        out.print(str(path))


def _cache_folder() -> Path:
    """Of what text encoders and VAEs gave."""
    import platformdirs

    return platformdirs.user_cache_path("autotune") / "encoded"
