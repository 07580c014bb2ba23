"""`autotune plan`: options to arguments, events to the terminal, the plan to a file."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import autotune
from autotune.cli.options import (
    Data,
    JobOptions,
    Json,
    WorkloadOptions,
    given,
    one_of,
    option,
    takes,
)
from autotune.cli.output import Progress, print_out, print_result, show_events
from autotune.report.text import wrapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `autotune plan` alone can be asked; the names are those of `autotune.plan`. None: not
    given."""

    model: str | None = option(
        "A folder in the diffusers layout, a known name, a hub id, or a single file."
    )
    data: Data = None
    earlier: Path | None = option(
        "Make this plan again; other options replace what it was made for.", "--from"
    )
    hardware: str | None = option("Plan for this GPU, e.g. 4090 (see probe --list).")
    path: Path = option("Where to write the plan.", "-o", "--output", default=Path("plan.yaml"))
    lora_alpha: float | None = option(
        "Alpha of the adapter; by default in proportion to the rank.", "--alpha", min=1e-3, max=1e6
    )
    lora_dropout: float | None = option(
        "Share of the adapter's inputs to drop; default 0.", "--dropout", min=0, max=0.9
    )
    quality: str | None = option(
        "exact: 16-bit weights; high (default): also 8-bit; compact: also 4-bit, and 8-bit "
        "products."
    )
    objective: str | None = option("throughput (default) or memory.")
    pins: list[str] | None = option("Choose only this value.", "--pin", metavar="KNOB=VALUE")
    exclusions: list[str] | None = option(
        "Never choose this value.", "--exclude", metavar="KNOB=VALUE"
    )
    for_trainer: str | None = option(
        "Choose only what this trainer can express and fit.", "--for", metavar="TRAINER"
    )
    list_knobs: bool = option(
        "Show what can be chosen, and what not and why; plan nothing.",
        "--list-knobs",
        default=False,
    )
    num_gpus: int | None = option(
        "GPUs that train together, one process each; tested on CPUs only.", "--gpus", min=1
    )
    max_memory: str | None = option(
        "The most memory of the GPU, or of the process on a CPU, that a run may take in any phase."
    )
    reserve_memory: str | None = option(
        "Memory to leave to the display and other programs, in place of the usual reserve.",
        "--reserve",
    )
    cap_memory: str | None = option("Rehearse a device with only so much memory, e.g. 12GiB.")
    use_records: bool = option(
        "Use what machines measured before.", "--profiles/--no-profiles", default=True
    )
    max_trials: int = option("The most trials to run.", default=8, min=1)
    search_seconds: float | None = option(
        "The most seconds of trials; by default 5% of the run, at least 60.", "--search-time", min=1
    )
    fresh: bool = option(
        "Forget what an interrupted search has measured.", "--fresh", default=False
    )
    study: str | None = option("Keep the trials and their plan under this name.")
    storage: str | None = option(
        "Share the study: postgresql+psycopg://user:password@host/database.",
        envvar="AUTOTUNE_STORAGE",
    )
    output: str | None = option("Output folder that the job will write.", "--run-output")
    as_json: Json = False


@takes(PlanOptions, WorkloadOptions, JobOptions)
def plan(options: PlanOptions, work: WorkloadOptions, job: JobOptions) -> None:
    """Search the fastest settings with short real trials, and freeze them into a plan."""
    from autotune.report.machine import elsewhere_lines
    from autotune.report.plan import knob_lines

    if options.earlier is None and options.model is None:
        raise typer.BadParameter(
            "name a model, or an earlier plan with --from", param_hint="--model"
        )
    one_of("--quality", options.quality, ("exact", "high", "compact"))
    one_of("--objective", options.objective, ("throughput", "memory"))
    pairs = {
        "pins": _pairs("--pin", options.pins),
        "exclusions": _pairs("--exclude", options.exclusions),
    }
    arguments: dict[str, Any] = given(options, but=("as_json", "list_knobs")) | given(pairs)
    arguments |= work.values() | job.values()
    if options.list_knobs:
        with show_events() as show:
            space = autotune.list_choices(on_event=show, **arguments)
        print_out(knob_lines(space))
        return
    try:
        if options.model and not options.hardware:
            autotune.require_gpu(options.model)
        with show_events() as show:
            made = autotune.plan(on_event=show, **arguments)
    except autotune.NoGpu as error:
        if error.elsewhere and not options.as_json:
            print_out(elsewhere_lines(error))
        error.hint = error.advice(
            shlex.join(["autotune", *_predictable(sys.argv[1:]), "--hardware", error.gpu])
        )
        raise
    except autotune.PlanNotWritten as error:
        typer.echo(autotune.plan_text(error.plan))
        hint = "keep what is printed above as a file: it is the whole plan"
        raise autotune.AutotuneError(
            f"{error.message}; the plan is printed instead", hint=hint
        ) from error
    print_result(made, options.as_json, lambda _: _ending(made, options.path))


def _ending(made: "autotune.TrainingPlan", file: Path) -> list[str]:
    """What a person needs; with `--verbose` everything."""
    from autotune.report.plan import (
        explain_lines,
        full_settings_lines,
        origin_lines,
        plan_lines,
        train_hint,
        user_values_line,
    )

    about, hint = plan_lines(made), train_hint(made, file)
    if Progress.is_verbose:
        everything = (full_settings_lines, explain_lines, origin_lines)
        return [*(line for lines in everything for line in (*lines(made), "")), *about, hint]
    more = f"{'more':<15}reasons: autotune explain; a page with charts: autotune report"
    return [*about, *user_values_line(made), *wrapped(more, 15), hint]


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...] | None:
    pairs = [text.partition("=") for text in texts or ()]
    wrong = next((name for name, sign, value in pairs if not (name and sign and value)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r} is not KNOB=VALUE", param_hint=option)
    return tuple((name, value) for name, _, value in pairs) or None


def _predictable(words: Sequence[str]) -> list[str]:
    """The words of a command without a search that is shared, whose URL may hold a password: a
    prediction shares nothing."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if not word.startswith("--storage") and before != "--storage"
    ]
