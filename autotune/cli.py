"""The command line: parses, calls one function, prints. Imports nothing heavy before a command runs.

probe ──> plan ──> plan.yaml ──> train
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.commands import about
from autotune.commands import data as data_commands
from autotune.commands import estimate as estimate_command
from autotune.commands import profiles as profiles_commands
from autotune.commands import weights as weights_commands
from autotune.errors import AutotuneError, Preempted
from autotune.quiet import silence_libraries

app = typer.Typer(
    help="Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them into a plan.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Options that stand before a command."""
    if version:
        from autotune import __version__

        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.command()
def probe(
    quick: Annotated[bool, typer.Option("--quick", help="Facts only; measure nothing.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the catalogue of GPUs instead.")] = False,
    device: Annotated[int, typer.Option(min=0, help="Which GPU, where there are several.")] = 0,
    as_json: Json = False,
) -> None:
    """Find out what this machine can really do, and keep the answer."""
    if listed:
        _list_catalogue(as_json)
        return
    from autotune.hardware.probe import probe as read_machine
    from autotune.hardware.store import cached_profile
    from autotune.reporting.hardware import profile_view
    from autotune.terminal import err, out

    with err.status("probing") as status:
        if quick:
            profile = read_machine(quick=True, index=device, on_progress=status.update)
        else:
            profile = cached_profile(fresh=True, index=device, on_progress=status.update)
    if as_json:
        typer.echo(profile.model_dump_json(indent=1))
    else:
        out.print(profile_view(profile))


def _list_catalogue(as_json: bool) -> None:
    from autotune.hardware.catalogue import catalogue
    from autotune.reporting.hardware import catalogue_view
    from autotune.terminal import out

    if as_json:
        typer.echo(json.dumps([gpu.model_dump(mode="json") for gpu in catalogue()], indent=1))
    else:
        out.print(catalogue_view(catalogue()))


app.command()(about.doctor)
app.command()(about.models)
app.command()(estimate_command.estimate)


@app.command()
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
    quality: Annotated[str, typer.Option(help="exact: 16-bit weights; high: 8-bit too; compact: 4-bit too.")] = "high",
    objective: Annotated[str, typer.Option(help="throughput or memory.")] = "throughput",
    pin: Annotated[list[str] | None, typer.Option(help="KNOB=VALUE: choose only this value.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="KNOB=VALUE: never choose this value.")] = None,
    list_knobs: Annotated[
        bool, typer.Option("--list-knobs", help="Show choices and exclusions; plan nothing.")
    ] = False,
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
        seed=seed,
        pins=_pairs("--pin", pin),
        exclusions=_pairs("--exclude", exclude),
        here=hardware is None,
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
    out.print("\n".join(plan_lines(made)), markup=False)
    out.print(f"written to {output}; train it with: autotune train {output}", markup=False)


@app.command()
def check(plan_file: PlanFile, as_json: Json = False) -> None:
    """Tell whether a plan fits this machine, without training."""
    from autotune.fit import hardware_misfits
    from autotune.hardware.probe import probe as read_machine
    from autotune.plan_file import read_plan

    misfits = hardware_misfits(read_plan(plan_file), read_machine(quick=True))
    if as_json:
        typer.echo(json.dumps({"fits": not misfits, "misfits": list(misfits)}, indent=1))
    else:
        for misfit in misfits:
            typer.echo(f"does not fit: {misfit}")
        if not misfits:
            typer.echo(f"{plan_file} is valid and fits this machine")
    if misfits:
        raise typer.Exit(4)


@app.command()
def explain(plan_file: PlanFile, as_json: Json = False) -> None:
    """Say why each setting was chosen, and what was rejected and why."""
    from autotune.plan_file import read_plan
    from autotune.reporting.plan import explain_lines

    chosen = read_plan(plan_file)
    if as_json:
        typer.echo(json.dumps([reason.model_dump(mode="json") for reason in chosen.frozen.reasons], indent=1))
    else:
        typer.echo("\n".join(explain_lines(chosen)))


@app.command()
def train(
    plan_file: PlanFile,
    model: Annotated[str | None, typer.Option(help="The same architecture from another folder.")] = None,
    data: Annotated[str | None, typer.Option(help="Another folder of captioned images.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for the adapter, samples and report.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, instead of steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of initial weights, order and noise.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Write a torch.profiler trace of a few steps.")] = False,
    as_json: Json = False,
) -> None:
    """Train exactly what a plan says; options override its job."""
    import platformdirs

    from autotune.plan_file import read_plan, with_job

    chosen = with_job(
        read_plan(plan_file),
        model=model,
        data=data,
        output=output,
        num_steps=steps,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
    )
    from autotune.hardware.probe import probe as read_machine
    from autotune.quiet import silence_progress_bars
    from autotune.reporting.run import report_lines
    from autotune.terminal import out, training_display
    from autotune.training.events import Events
    from autotune.training.prepare import prepare
    from autotune.training.processes import launch, started_by_launcher
    from autotune.training.run import train as run

    silence_progress_bars()
    hardware = read_machine(quick=True)
    if chosen.frozen.hardware.num_processes > 1 and not started_by_launcher():
        prepare(chosen, hardware, resume=resume)  # so that what is wrong is said once
        raise typer.Exit(launch(chosen.frozen.hardware.num_processes, sys.argv[1:]))
    cache = platformdirs.user_cache_path("autotune") / "encoded"
    with training_display() as display:
        events = Events(
            on_phase=display.phase, on_encoded=display.encoded, on_step=display.step, on_warning=display.warn
        )
        report = run(chosen, hardware, cache, events, resume=resume, trace=trace)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
        return
    out.print("\n".join(report_lines(report)), markup=False)
    out.print(f"adapter: {Path(chosen.job.output) / report.adapter}", markup=False)


@app.command()
def sample(
    run_folder: Annotated[Path, typer.Argument(help="Output folder of a training run.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="What to show.")],
    count: Annotated[int, typer.Option(min=1, help="Pictures, each from another seed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; the plan's by default.")] = None,
    control: Annotated[list[Path] | None, typer.Option(help="Control image of an edit model; repeat for more.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="PNG file; in RUN by default.")] = None,
) -> None:
    """Sample from a trained adapter, through the model's stock pipeline."""
    from autotune.quiet import silence_libraries, silence_progress_bars

    silence_libraries()
    from autotune.hardware.probe import probe as read_machine
    from autotune.terminal import err
    from autotune.training.sample import sample_run

    silence_progress_bars()
    with err.status("sampling") as status:
        written = sample_run(
            run_folder,
            read_machine(quick=True),
            prompt,
            count=count,
            seed=seed,
            num_steps=steps,
            control_paths=tuple(control or ()),
            output=output,
            on_progress=status.update,
        )
    for path in written:
        typer.echo(path)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("demo"),
    model: Annotated[str, typer.Option(help="Model family to show.")] = "qwen-image",
) -> None:
    """Walk the whole journey on a small real pipeline: probe, plan, train, sample."""
    from autotune.demo import make_demo
    from autotune.quiet import silence_progress_bars
    from autotune.terminal import err, out

    with err.status("writing a small pipeline and drawing images"):
        silence_progress_bars()
        made = make_demo(output, model)
    size = sum(path.stat().st_size for path in made.model.rglob("*") if path.is_file())
    out.print(f"a small {model} pipeline ({size / 1e6:.0f} MB) in {made.model}, images in {made.images}", markup=False)
    plan_file, result = output / "plan.yaml", output / "result"
    _announce("autotune probe")
    probe()
    extra = f" --control {made.control}" if made.control else ""
    extra += f" --frames {made.num_frames}" if made.num_frames > 1 else ""
    sizes = f"--resolution 64 --steps 60{extra}"
    _announce(f"autotune plan --model {made.model} --data {made.images} {sizes} -o {plan_file}")
    plan(
        model=str(made.model),
        data=made.images,
        control=made.control,
        frames=made.num_frames,
        output=plan_file,
        resolution="64",
        steps=60,
        run_output=str(result),
    )
    _announce(f"autotune train {plan_file}")
    train(plan_file)
    out.print(f"samples: {result / 'sample_with_adapter.png'} and sample_without_adapter.png", markup=False)


app.add_typer(data_commands.app, name="data")
app.add_typer(profiles_commands.app, name="profiles")
app.add_typer(weights_commands.app, name="weights")


def _announce(command: str) -> None:
    from autotune.terminal import out

    out.print(f"\n$ {command}", style="bold", markup=False)


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


def main() -> None:
    """Run the command line and exit with the status that errors.py lists."""
    silence_libraries()
    try:
        app()
    except AutotuneError as error:
        if isinstance(error, Preempted) and os.environ.get("RANK", "0") != "0":
            sys.exit(error.exit_status)  # the first of several processes says it
        _fail(error.message, error.hint, error.exit_status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("AUTOTUNE_TRACEBACK"):
            raise
        first = (str(error).strip().splitlines() or ["no message"])[0]
        _fail(
            f"{type(error).__name__}: {first}",
            "this is a bug in autotune; AUTOTUNE_TRACEBACK=1 shows where. Please report it",
            1,
        )


def _fail(message: str, hint: str, status: int) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\nhint: {hint}\n")
    sys.exit(status)
