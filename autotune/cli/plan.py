"""`autotune plan`: options to a question, progress to the terminal, the answer to a file."""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.options import (
    Batch,
    Data,
    Frames,
    JobOptions,
    Json,
    Price,
    Rank,
    Resolution,
    Targets,
    one_of,
    takes,
    tell,
)
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.planning import PlanRequest
    from autotune.schema import TrainingPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `autotune plan` can be asked beside the job. None and empty: not said."""

    model: Annotated[str | None, typer.Option(help="A folder in the diffusers layout, a known name, or a hub id.")] = (
        None
    )
    data: Data = None
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Ask again what this plan answered; other options go before it.")
    ] = None
    hardware: Annotated[str | None, typer.Option(help="Plan for this GPU instead (see probe --list).")] = None
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the plan.")] = Path("plan.yaml")
    resolution: Resolution = None
    frames: Frames = None
    rank: Rank = None
    alpha: Annotated[float | None, typer.Option(min=1e-3, max=1e6, help="By default in proportion to the rank.")] = None
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="Of the adapter's inputs; default 0.")] = None
    targets: Targets = None
    batch: Batch = None
    quality: Annotated[
        str | None, typer.Option(help="exact: 16-bit weights; high (default): 8-bit too; compact: 4-bit too.")
    ] = None
    objective: Annotated[str | None, typer.Option(help="throughput (default) or memory.")] = None
    pin: Annotated[list[str] | None, typer.Option(help="Choose only this value.", metavar="KNOB=VALUE")] = None
    exclude: Annotated[list[str] | None, typer.Option(help="Never choose this value.", metavar="KNOB=VALUE")] = None
    list_knobs: Annotated[bool, typer.Option("--list-knobs", help="Show choices and exclusions; plan nothing.")] = False
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that train together, one process each.")] = None
    max_memory: Annotated[str | None, typer.Option(help="Most a run may take, e.g. 20GiB.")] = None
    reserve: Annotated[str | None, typer.Option(help="Memory to leave to others, e.g. 2GiB.")] = None
    cap_memory: Annotated[str | None, typer.Option(help="Rehearse a device with only so much memory, e.g. 12GiB.")] = (
        None
    )
    profiles: Annotated[bool, typer.Option(help="Use what machines measured before.")] = True
    max_trials: Annotated[int, typer.Option(min=1, help="Most trials to run.")] = 8
    search_time: Annotated[
        float | None, typer.Option(min=1, help="Most seconds of trials; by default 5% of the run, at least 60.")
    ] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted search has measured.")] = False
    study: Annotated[str | None, typer.Option(help="Keep trials under this name, its plan too.")] = None
    join: Annotated[
        str | None,
        typer.Option(
            envvar="AUTOTUNE_JOIN", help="Share the search: postgresql+psycopg://user:password@host/database."
        ),
    ] = None
    record: Annotated[Path | None, typer.Option(help="Write what the search met to this file.")] = None
    replay: Annotated[Path | None, typer.Option(help="Plan from such a file instead of trials.")] = None
    price: Price = None
    run_output: Annotated[str | None, typer.Option(help="Output folder that the job will write.")] = None
    as_json: Json = False


@takes(PlanOptions, JobOptions)
def plan(asked: PlanOptions, job: JobOptions) -> None:
    """Search the fastest settings with short real trials, and freeze them into a plan."""
    from autotune.cli.machine import machine_for
    from autotune.cli.terminal import err, out, show_events
    from autotune.planning import (
        PlannerBackend,
        list_choices,
        make_plan,
        read_recording,
        recording_of,
        replayed,
        write_recording,
    )
    from autotune.reporting import knob_lines, note_text, origin_lines, plan_lines
    from autotune.runtime import require_writable
    from autotune.sharing import remember, why_no_evidence

    request = request_from_options(asked, job)
    recording = read_recording(asked.replay) if asked.replay else None
    backend = replayed(recording) if recording else PlannerBackend()
    limits = {"max_memory": asked.max_memory, "reserve": asked.reserve, "cap_memory": asked.cap_memory}
    machine = (
        recording.hardware if recording else machine_for(asked.hardware, num_devices=request.num_processes, **limits)
    )
    if asked.list_knobs:
        out.print("\n".join(knob_lines(list_choices(request, machine))))
        return
    for target in (asked.output, asked.record):
        if target is not None:
            require_writable(target)
    with show_events() as show:
        result = make_plan(request, machine, show, backend)
    made = result.plan
    _write(asked.output, made)
    if asked.record is not None:
        shared = request.study is not None
        write_recording(asked.record, recording_of(made, result.hardware, result.matches.known, shared=shared))
    if recording is None and why_no_evidence(made, machine) is None:
        try:
            remember(made, machine, result.residuals)
        except AutotuneError as error:  # the plan is made all the same
            err.print(note_text(f"not kept for the next search: {error.message}", "profiles"), style="yellow")
    written = f"written to {asked.output}; train it with: autotune train {shlex.quote(str(asked.output))}"
    tell(made, asked.as_json, lambda _: [*plan_lines(made), *origin_lines(made), written])


def _write(path: Path, made: "TrainingPlan") -> None:
    """Write the plan, or print it where the disk has become full meanwhile: it took a search to find.

    Raises:
        AutotuneError: it could not be written.
    """
    from autotune.schema import plan_text, write_plan

    try:
        write_plan(path, made)
    except OSError as error:
        typer.echo(plan_text(made))
        raise AutotuneError(
            f"cannot write {path}: {error.strerror}; the plan is printed instead",
            hint="keep what is printed above as a file: it is the whole plan",
        ) from error


def request_from_options(asked: PlanOptions, job: JobOptions) -> "PlanRequest":
    """The options as a question, over that of an earlier plan where one is named.

    Raises:
        BadParameter: an option's value cannot be, or two options do not go together.
    """
    from autotune.cost import parse_resolution
    from autotune.planning import PlanRequest, request_from
    from autotune.schema import read_plan
    from autotune.search import StudyPlace

    if asked.earlier is None and asked.model is None:
        raise typer.BadParameter("name a model, or an earlier plan with --from", param_hint="--model")
    live = (asked.hardware, asked.join, asked.study, asked.max_memory, asked.reserve, asked.cap_memory)
    if asked.replay is not None and any(live):
        raise typer.BadParameter("a recording brings its machine and its trials", param_hint="--replay")
    base = request_from(read_plan(asked.earlier)) if asked.earlier else PlanRequest(model=str(asked.model))
    workload_overrides = _changed(
        dataclasses.replace(base.workload_overrides, lora_alpha=None) if asked.rank else base.workload_overrides,
        size_px=parse_resolution(asked.resolution) if asked.resolution else None,
        num_frames=asked.frames,
        rank=asked.rank,
        lora_alpha=asked.alpha,
        lora_dropout=asked.dropout,
        targets=asked.targets,
        effective_batch_size=asked.batch,
        quality=one_of("--quality", asked.quality, ("exact", "high", "compact")),
        objective=one_of("--objective", asked.objective, ("throughput", "memory")),
    )
    folders = {"data": asked.data, "output": asked.run_output}
    return _changed(  # type: ignore[no-any-return]
        base,
        model=asked.model,
        max_trials=asked.max_trials,
        workload_overrides=workload_overrides,
        job_overrides={**job.values(), **{name: folder for name, folder in folders.items() if folder}},
        pins=_pairs("--pin", asked.pin),
        exclusions=_pairs("--exclude", asked.exclude),
        is_local=asked.hardware is None,
        num_processes=asked.gpus,
        use_profiles=asked.profiles,
        price_per_hour=asked.price,
        search_seconds=asked.search_time,
        study=StudyPlace(asked.study or "search", asked.join) if asked.study or asked.join else None,
        interrupted="ignored" if asked.replay else ("forgotten" if asked.fresh else "resumed"),
    )


def _changed(thing: Any, **values: object) -> Any:
    """`thing` with all values that were given."""
    return dataclasses.replace(thing, **{name: value for name, value in values.items() if value not in (None, (), {})})


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in texts or ()]
    wrong = next((name for name, sign, value in pairs if not (name and sign and value)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r} is not KNOB=VALUE", param_hint=option)
    return tuple((name, value) for name, _, value in pairs)
