"""`autotune demo`: the other commands, one after the other, on a small real pipeline."""

import contextlib
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from autotune.cli.commands import JSON, PATH, app
from autotune.cli.output import Progress, print_out, print_result, show_events
from autotune.system.process import PYTHON

if TYPE_CHECKING:
    from autotune.demo.lesson import ConceptFidelity


@app.command()
@click.option("--output", type=PATH, default="demo", help="Folder for everything the demo makes.")
@click.option("--no-profiles", is_flag=True, help="Search even if a record has the answer.")
@JSON
@click.pass_context
def demo(context: click.Context, output: Path, no_profiles: bool, as_json: bool) -> None:
    """Walk the whole journey on a small real pipeline: probe, plan, train, sample."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = _walk(context, output, no_profiles)
    if as_json:
        print_result({"output": str(output), "concept_fidelity": asdict(found)}, as_json, str)


def _walk(context: click.Context, output: Path, no_profiles: bool) -> "ConceptFidelity":
    Progress.after_interrupt = (
        f"a demo always starts over: remove {output}, or name another folder with --output"
    )
    from autotune.demo.lesson import judge_lesson, make_demo
    from autotune.events import StatusChanged
    from autotune.system.process import warm_up

    warm_up()
    with show_events() as show:
        show(StatusChanged(text="writing a small pipeline and drawing images"))
        made = make_demo(output)
    size = sum(path.stat().st_size for path in made.model.rglob("*") if path.is_file())
    new = made.new_shape
    print_out(f"a small Qwen-Image ({size / 1e6:.0f} MB) in {made.model}, images in {made.images}")
    print_out(f"it has never seen a {new}: twelve pictures teach it, the others are its own")
    plan_file, result = output / "plan.yaml", output / "result"
    asked = ["--model", made.model, "--data", made.images, "--resolution", 64, *made.plan_options]
    # By default a search takes a minute for so short a run, too little on a busy machine.
    asked += ["--search-time", 600, "--run-output", result, "-o", plan_file]
    asked += ["--no-profiles"] if no_profiles else []
    _run(context, "probe")
    _run(context, "plan", *asked)
    _run_alone("train", plan_file)
    with show_events() as show:
        text = "sampling prompts that were in no picture, and judging them"
        show(StatusChanged(text=text))
        found = judge_lesson(made.model, result)
    taught = f"a {new} in colors and on backgrounds that were not taught"
    others = f"{found.others_before:.2f} before, {found.others_after:.2f} after"
    print_out(f"\nconcept fidelity (0 to 1) of {taught}:")
    print_out(f"  {found.before:.2f} before, {found.after:.2f} after")
    print_out(f"  the shapes that it knew: {others}")
    print_out(f"picture: {result / 'concept.png'}; figures: {result / 'concept.json'}")
    return found


def _run(context: click.Context, *words: object) -> None:
    """Show a command and run it here, where the libraries are loaded."""
    root = context.find_root()
    command = _shown(*words)
    if status := root.command.main(command, prog_name=root.info_name, standalone_mode=False):
        raise Exit(status)  # it has said why


def _run_alone(*words: object) -> None:
    """Show a command and run it in a process of its own, whose memory the plan promised."""
    command = [*PYTHON, "-m", "autotune", *_shown(*words)]
    process = subprocess.Popen(command, stdout=2 if sys.stdout is sys.stderr else None)
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # the command got it, too, and says so
            process.wait()
    if process.returncode:
        raise Exit(process.returncode)


def _shown(*words: object) -> list[str]:
    """The command, as loud as the demo itself."""
    command = [str(word) for word in words]
    print_out(f"\n$ autotune {shlex.join(command)}", style="bold")
    loud = ["--verbose"] if Progress.is_verbose else []
    return ["--progress", Progress.form, *loud, *command]
