"""`autotune plan`: options to arguments, events to the terminal, the plan to a file."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import autotune
from autotune import reporting
from autotune.cli.options import (
    ADAPTERS,
    Adapter,
    Assume,
    Batch,
    Blocks,
    Data,
    Ema,
    Frames,
    HostMemory,
    JobOptions,
    Json,
    Optimizer,
    OptimizerOptions,
    Price,
    Rank,
    Resolution,
    Targets,
    given,
    named_values,
    one_of,
    takes,
)
from autotune.cli.output import Progress, print_out, print_result, show_events


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `autotune plan` can be asked beside the job; the names are those of `autotune.plan`. None: not given."""

    model: Annotated[
        str | None, typer.Option(help="A folder in the diffusers layout, a known name, a hub id, or a single file.")
    ] = None
    data: Data = None
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Make this plan again; other options replace what it was made for.")
    ] = None
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="Plan for this GPU, e.g. 4090 (see probe --list); repeat it for a file with a variant each."),
    ] = None
    host_memory: HostMemory = None
    assume: Assume = None
    path: Annotated[Path, typer.Option("-o", "--output", help="Where to write the plan.")] = Path("plan.yaml")
    resolution: Resolution = None
    num_frames: Frames = None
    rank: Rank = None
    lora_alpha: Annotated[
        float | None, typer.Option("--alpha", min=1e-3, max=1e6, help="By default in proportion to the rank.")
    ] = None
    lora_dropout: Annotated[
        float | None, typer.Option("--dropout", min=0, max=0.9, help="Share of the adapter's inputs; default 0.")
    ] = None
    targets: Targets = None
    adapted_blocks: Blocks = None
    adapter: Adapter = None
    ema_decay: Ema = None
    optimizer: Optimizer = None
    optimizer_options: OptimizerOptions = None
    effective_batch_size: Batch = None
    quality: Annotated[
        str | None,
        typer.Option(help="exact: 16-bit weights; high (default): 8-bit too; compact: 4-bit, and 8-bit products, too."),
    ] = None
    objective: Annotated[str | None, typer.Option(help="throughput (default), memory or energy.")] = None
    pins: Annotated[list[str] | None, typer.Option("--pin", help="Choose only this value.", metavar="KNOB=VALUE")] = (
        None
    )
    exclusions: Annotated[
        list[str] | None, typer.Option("--exclude", help="Never choose this value.", metavar="KNOB=VALUE")
    ] = None
    for_trainer: Annotated[
        str | None,
        typer.Option("--for", help="Choose what this trainer can express and hold.", metavar="TRAINER"),
    ] = None
    list_knobs: Annotated[bool, typer.Option("--list-knobs", help="Show choices and exclusions; plan nothing.")] = False
    num_gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="GPUs that train together, one process each; tried on CPUs alone."),
    ] = None
    num_nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Machines that these GPUs are in.")] = None
    interconnect: Annotated[
        str | None, typer.Option(help="Rate between two machines, e.g. 400Gbps; 10Gbps unless given.")
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(help="The most memory of the GPU, or of the process on a CPU, that a run may take in any phase."),
    ] = None
    reserve_memory: Annotated[
        str | None,
        typer.Option("--reserve", help="Memory to leave to display and other programs, instead of what is usual."),
    ] = None
    cap_memory: Annotated[str | None, typer.Option(help="Rehearse a device with only so much memory, e.g. 12GiB.")] = (
        None
    )
    use_records: Annotated[
        bool, typer.Option("--profiles/--no-profiles", help="Use what machines measured before.")
    ] = True
    max_trials: Annotated[int, typer.Option(min=1, help="The most trials to run.")] = 8
    search_seconds: Annotated[
        float | None,
        typer.Option("--search-time", min=1, help="The most seconds of trials; by default 5% of the run, at least 60."),
    ] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted search has measured.")] = False
    study: Annotated[str | None, typer.Option(help="Keep trials under this name, and their plan too.")] = None
    join: Annotated[
        str | None,
        typer.Option(
            envvar="AUTOTUNE_JOIN",
            help="Share the search: postgresql+psycopg://user:password@host/database, or /shared/NAME.journal.",
        ),
    ] = None
    record: Annotated[Path | None, typer.Option(help="Write what the search met to this file.")] = None
    replay: Annotated[Path | None, typer.Option(help="Plan from such a file instead of trials.")] = None
    price_per_hour: Price = None
    output: Annotated[str | None, typer.Option("--run-output", help="Output folder that the job will write.")] = None
    as_json: Json = False


@takes(PlanOptions, JobOptions)
def plan(options: PlanOptions, job: JobOptions) -> None:
    """Search the fastest settings with short real trials, and freeze them into a plan."""
    if options.earlier is None and options.model is None:
        raise typer.BadParameter("name a model, or an earlier plan with --from", param_hint="--model")
    one_of("--quality", options.quality, ("exact", "high", "compact"))
    one_of("--adapter", options.adapter, ADAPTERS)
    one_of("--objective", options.objective, ("throughput", "memory", "energy"))
    pairs: dict[str, Any] = {
        "pins": _pairs("--pin", options.pins),
        "exclusions": _pairs("--exclude", options.exclusions),
    }
    pairs["optimizer_options"] = named_values(options.optimizer_options)
    arguments: dict[str, Any] = {**given(options, but=("as_json", "list_knobs")), **job.values(), **given(pairs)}
    if len(options.hardware or ()) > 1 and not options.list_knobs:
        with show_events() as show:
            variants = autotune.plan_variants(on_event=show, **arguments)
        print_result(variants, options.as_json, lambda _: reporting.variant_lines(variants, options.path))
        return
    if options.hardware:
        arguments["hardware"] = options.hardware[0]
    if options.list_knobs:
        with show_events() as show:
            space = autotune.list_choices(on_event=show, **arguments)
        print_out(reporting.knob_lines(space))
        return
    try:
        if options.model and not (options.hardware or options.replay):
            autotune.require_gpu(options.model)
        with show_events() as show:
            made = autotune.plan(on_event=show, **arguments)
    except autotune.NoGpu as error:
        if error.elsewhere and not options.as_json:
            print_out(reporting.elsewhere_lines(error))
        error.hint = error.advice(shlex.join(["autotune", *_predictable(sys.argv[1:]), "--hardware", error.gpu]))
        raise
    except autotune.PlanNotWritten as error:
        typer.echo(autotune.plan_text(error.plan))
        hint = "keep what is printed above as a file: it is the whole plan"
        raise autotune.AutotuneError(f"{error.message}; the plan is printed instead", hint=hint) from error
    print_result(
        made,
        options.as_json,
        lambda _: _ending(made, options.path),
    )


def _ending(made: "autotune.TrainingPlan", file: Path) -> list[str]:
    """What a person needs; with `--verbose` everything."""
    if Progress.is_verbose:
        everything = [*reporting.full_settings_lines(made), "", *reporting.explain_lines(made), ""]
        return [
            *everything,
            *reporting.origin_lines(made),
            "",
            *reporting.plan_lines(made),
            reporting.train_hint(made, file),
        ]
    more = f"{'more':<15}reasons: autotune explain; a page with charts: autotune report"
    return [
        *reporting.plan_lines(made),
        *reporting.user_values_line(made),
        *reporting.wrapped(more, 15),
        reporting.train_hint(made, file),
    ]


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...] | None:
    pairs = [text.partition("=") for text in texts or ()]
    wrong = next((name for name, sign, value in pairs if not (name and sign and value)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r} is not KNOB=VALUE", param_hint=option)
    return tuple((name, value) for name, _, value in pairs) or None


def _predictable(words: Sequence[str]) -> list[str]:
    """The words of a command with throughput in place of an objective that only a measurement serves."""
    kept: list[str] = []
    for word in words:
        is_value = bool(kept) and kept[-1] == "--objective" and word == "energy"
        kept.append("throughput" if is_value else word.replace("--objective=energy", "--objective=throughput"))
    return kept
