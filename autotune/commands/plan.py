"""`autotune plan`, and what can be asked of a plan file: `check` and `explain`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.commands.options import Json, PlanFile, parse_shift


def plan(
    model: Annotated[str, typer.Option(help="A folder in the diffusers layout, or a known model's name.")],
    data: Annotated[Path | None, typer.Option(help="Folder of images with same-stem .txt captions.")] = None,
    control: Annotated[Path | None, typer.Option(help="Folder of control images, for edit models.")] = None,
    caption: Annotated[str | None, typer.Option(help="Caption of images that have none.")] = None,
    trigger: Annotated[str | None, typer.Option(help="Word put in front of every caption.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Plan for this GPU instead (see probe --list).")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the plan.")] = Path("plan.yaml"),
    resolution: Annotated[str | None, typer.Option(help="Side of a square in pixels, or WIDTHxHEIGHT.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a clip, for video models.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the adapter.")] = None,
    targets: Annotated[str, typer.Option(help="attention, attention+mlp or all-linear.")] = "attention",
    batch: Annotated[int | None, typer.Option(min=1, help="Images per optimizer step (effective batch).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the job.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the job.")] = None,
    sampling: Annotated[
        str, typer.Option("--timestep-sampling", help="Noise levels: logit_normal or uniform.")
    ] = "logit_normal",
    shift: Annotated[
        str | None, typer.Option("--timestep-shift", help="Of the noise levels: a number, or by_resolution.")
    ] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Of guidance-distilled models, in training.")] = None,
    quality: Annotated[str, typer.Option(help="exact: 16-bit weights; high: 8-bit too; compact: 4-bit too.")] = "high",
    objective: Annotated[str, typer.Option(help="throughput or memory.")] = "throughput",
    pin: Annotated[list[str] | None, typer.Option(help="KNOB=VALUE: choose only this value.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="KNOB=VALUE: never choose this value.")] = None,
    list_knobs: Annotated[
        bool, typer.Option("--list-knobs", help="Show choices and exclusions; plan nothing.")
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train together, one process each.")] = 1,
    max_memory: Annotated[str | None, typer.Option(help="Most a run may take, e.g. 20GiB.")] = None,
    reserve: Annotated[str | None, typer.Option(help="Memory to leave to others, e.g. 2GiB.")] = None,
    profiles: Annotated[bool, typer.Option(help="Use what machines measured before.")] = True,
    max_trials: Annotated[int, typer.Option(min=1, help="Most trials to run.")] = 8,
    search_time: Annotated[float, typer.Option(min=1, help="Most seconds to search.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job.")] = 0,
    run_output: Annotated[str, typer.Option(help="Output folder that the job will write.")] = "output",
    as_json: Json = False,
) -> None:
    """Search the fastest settings with short real trials, and freeze them into a plan."""
    from autotune.commands.machine import machine_for
    from autotune.cost.arguments import parse_resolution
    from autotune.plan_file import write_plan
    from autotune.planner import Events, Question, list_choices, make_plan
    from autotune.reporting.origins import origin_lines
    from autotune.reporting.plan import knob_lines, plan_lines, prediction_lines, survey_lines, workload_lines
    from autotune.sharing.store import remember
    from autotune.terminal import err, out, trial_display
    from autotune.training.describe import Wishes

    question = Question(
        model=model,
        data=data,
        control=control,
        caption=caption,
        trigger=trigger,
        wishes=Wishes(
            size_px=parse_resolution(resolution) if resolution else None,
            num_frames=frames,
            rank=rank,
            targets=targets,
            effective_batch_size=batch,
            quality=_one_of("--quality", quality, ("exact", "high", "compact")),
            objective=_one_of("--objective", objective, ("throughput", "memory")),
        ),
        output=run_output,
        num_steps=steps,
        learning_rate=learning_rate,
        timestep_sampling=_one_of("--timestep-sampling", sampling, ("logit_normal", "uniform")),
        timestep_shift=parse_shift(shift),
        guidance_scale=guidance,
        seed=seed,
        pins=_pairs("--pin", pin),
        exclusions=_pairs("--exclude", exclude),
        here=hardware is None,
        num_processes=gpus,
        use_profiles=profiles,
        max_trials=max_trials,
        search_seconds=search_time,
    )
    machine = machine_for(hardware, max_memory=max_memory, reserve=reserve)
    if list_knobs:
        out.print("\n".join(knob_lines(list_choices(question, machine))), markup=False)
        return
    with trial_display(max_trials) as display:
        events = Events(
            on_space=lambda space, workload: err.print("\n".join(workload_lines(workload, len(space.candidates)))),
            on_survey=lambda survey: err.print("\n".join(survey_lines(survey)), end="", markup=False),
            on_start=display.start,
            on_trial=display.show,
            on_predictions=lambda all_: err.print("\n".join(prediction_lines(all_, machine.device.budget_bytes))),
        )
        made = make_plan(question, machine, events)
    write_plan(output, made)
    capped = max_memory is not None or reserve is not None  # a rehearsal of a smaller device is no evidence for it
    if not capped and made.frozen.expected.evidence == "measured":
        remember(made, machine)
    if as_json:
        typer.echo(made.model_dump_json(indent=1))
        return
    out.print("\n".join([*plan_lines(made), *origin_lines(made)]), markup=False)
    out.print(f"written to {output}; train it with: autotune train {output}", markup=False)


def check(plan_file: PlanFile, as_json: Json = False) -> None:
    """Tell whether a plan fits this machine, without training."""
    from autotune.fit import hardware_misfits
    from autotune.hardware.probe import probe as read_machine
    from autotune.plan_file import read_plan
    from autotune.training.processes import device_misfits

    chosen, machine = read_plan(plan_file), read_machine(quick=True)
    misfits = hardware_misfits(chosen, machine) + device_misfits(chosen.frozen.hardware.num_processes, machine)
    if as_json:
        typer.echo(json.dumps({"fits": not misfits, "misfits": list(misfits)}, indent=1))
    else:
        for misfit in misfits:
            typer.echo(f"does not fit: {misfit}")
        if not misfits:
            typer.echo(f"{plan_file} is valid and fits this machine")
    if misfits:
        raise typer.Exit(4)


def explain(plan_file: PlanFile, as_json: Json = False) -> None:
    """Say why each setting was chosen, and what was rejected and why."""
    from autotune.plan_file import read_plan
    from autotune.reporting.origins import origin_lines
    from autotune.reporting.plan import explain_lines

    chosen = read_plan(plan_file)
    if as_json:
        typer.echo(json.dumps([reason.model_dump(mode="json") for reason in chosen.frozen.reasons], indent=1))
    else:
        typer.echo("\n".join([*explain_lines(chosen), "", *origin_lines(chosen)]))


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return value


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in texts or ()]
    wrong = next((name for name, sign, value in pairs if not (name and sign and value)), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r} is not KNOB=VALUE", param_hint=option)
    return tuple((name, value) for name, _, value in pairs)
