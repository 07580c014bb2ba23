"""`autotune train` runs a plan; `autotune sample` shows what came of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune.cli.options import (
    Data,
    JobOptions,
    Json,
    PlansOptimizer,
    argument,
    given,
    option,
    takes,
)
from autotune.cli.output import print_out, print_remark, print_result, show_events


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `autotune train` can be asked beside the job; the names are those of
    `autotune.train`."""

    plan_file: Path | None = argument(
        "A plan made by `autotune plan`; without one, --model is planned first.",
        default=None,
        metavar="[PLAN]",
    )
    model: str | None = option(
        "Another folder of the same architecture; without PLAN, the model to train."
    )
    data: Data = None
    optimizer: PlansOptimizer = None
    output: str | None = option("Folder for the adapter, samples and report.")
    resume: bool = option(
        "Continue from the newest checkpoint, if there is one.", "--resume", default=False
    )
    trace: bool = option(
        "Write a trace of a few steps (torch.profiler) to trace.json.", "--trace", default=False
    )
    metrics_port: int | None = option(
        "Serve Prometheus metrics at this port of localhost.", min=1, max=65535
    )
    push_to_hub: str | None = option(
        "Upload adapter, samples and a model card, privately, at the end.", metavar="OWNER/NAME"
    )
    as_json: Json = False


NOT_OF_TRAIN = ("plan_file", "as_json", "push_to_hub")


@takes(TrainOptions, JobOptions)
def train(options: TrainOptions, job: JobOptions) -> None:
    """Train exactly what a plan says; options override its job."""
    from autotune.report.run import PAGE_FILE, after_training_lines, report_lines

    arguments = {**given(options, but=NOT_OF_TRAIN), **job.values()}
    if options.push_to_hub is not None:
        from autotune.weights.hub import require_hub

        require_hub(options.push_to_hub)
    if options.plan_file is None and not options.resume:
        if options.model is None:
            raise typer.BadParameter(
                "name a plan, or what to plan for: --model and --data", param_hint="PLAN"
            )
        autotune.require_gpu(options.model)
    with show_events() as show:
        report = autotune.train(options.plan_file, on_event=show, **arguments)
    if not autotune.is_first_process():
        return
    folder = arguments.get("output") or autotune.Job.model_fields["output"].default
    plan = autotune.load_plan(options.plan_file or Path(folder) / "run-plan.yaml")
    planned = plan.job
    output = Path(arguments.get("output") or planned.output)
    has_page = (output / PAGE_FILE).is_file()
    after = after_training_lines(report, output, planned.report_to, has_page=has_page)
    print_result(report, options.as_json, lambda _: [*report_lines(report), *after])
    if options.push_to_hub is not None:
        from autotune.api.publishing import push_to_hub

        print_remark(f"uploaded to {push_to_hub(output, options.push_to_hub)}")


def sample(
    run_folder: Annotated[
        Path,
        typer.Argument(
            help="Output folder of a run; or a plan, for its model alone.", metavar="RUN|PLAN"
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to show.")],
    count: Annotated[int, typer.Option(min=1, help="Pictures, each from another seed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of the first picture.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; the plan's by default.")
    ] = None,
    control: Annotated[
        list[Path] | None,
        typer.Option(help="Control image of an edit model; repeat for more.", metavar="FILE"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File, .mp4 for a clip; in RUN or beside PLAN by default."
        ),
    ] = None,
) -> None:
    """Sample from a trained adapter, or from a plan's model alone, through the model's stock
    pipeline."""
    with show_events() as show:
        written = autotune.sample(
            run_folder, prompt, count=count, seed=seed, num_steps=steps, control=control or (),
            path=output,
            on_event=show,
        )  # fmt: skip
    print_out([str(path) for path in written])
