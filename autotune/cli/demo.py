"""Commands made of the others: `demo` runs them one after the other, `ui` from a page."""

import contextlib
import io
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

import autotune
from autotune.cli.commands import JSON, PATH, app
from autotune.cli.output import (
    Progress,
    print_json,
    print_out,
    print_remark,
    print_result,
    show_events,
)
from autotune.report.text import titled_command, wrapped
from autotune.system.process import PYTHON

if TYPE_CHECKING:
    from autotune.demo.lesson import ConceptFidelity


@app.command()
@click.option("--output", type=PATH, default="demo", help="Folder for everything the demo makes.")
@click.option("--profiles/--no-profiles", default=True, help="Use what machines measured before.")
@click.option("--quick", is_flag=True, help="Only make model and images, for the page: `ui`.")
@JSON
@click.pass_context
def demo(context: click.Context, output: Path, profiles: bool, quick: bool, as_json: bool) -> None:
    """Walk the whole journey on a small real pipeline: probe, plan, train, sample."""
    if quick:
        _prepare_page(output, as_json=as_json)
        return
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = _walk(context, output, profiles)
    if as_json:
        print_result({"output": str(output), "concept_fidelity": asdict(found)}, as_json, str)


def _prepare_page(output: Path, *, as_json: bool) -> None:
    from autotune.cli.jobs import Jobs
    from autotune.demo.lesson import make_demo
    from autotune.events import StatusChanged

    with show_events() as show:
        show(StatusChanged(text="writing a small pipeline and drawing images"))
        made = make_demo(output)
    asked = ["--model", "model", "--data", "images", "--resolution", "64", *made.plan_options]
    Jobs(output).draft(["plan", *asked, "--search-time", "600"])  # fills in the page's form
    print_result({"output": str(output)}, as_json, lambda _: f"open it: autotune ui {output}")


def _walk(context: click.Context, output: Path, profiles: bool) -> "ConceptFidelity":
    fix = f"remove {output}, or name another folder with --output"
    Progress.after_interrupt = f"a demo always starts over: {fix}"
    from autotune.demo.lesson import judge_lesson, make_demo
    from autotune.events import StatusChanged
    from autotune.system.process import fork_server_context

    fork_server_context()  # it imports for seconds, beside this process
    with show_events() as show:
        show(StatusChanged(text="writing a small pipeline and drawing images"))
        made = make_demo(output)
    new = made.new_shape
    story = f"A small Qwen-Image in {made.model} has never seen a {new}: twelve pictures in "
    print_out(wrapped(f"{story}{made.images} teach it.", 0))
    plan_file, result = output / "plan.yaml", output / "result"
    asked = ["--model", made.model, "--data", made.images, "--resolution", 64, *made.plan_options]
    # By default a search takes a minute for so short a run, too little on a busy machine.
    asked += ["--search-time", 600, "--run-output", result, "-o", plan_file]
    asked += [] if profiles else ["--no-profiles"]
    _run(context, 2, "probe")
    _run(context, 5, "plan", *asked)
    _run_alone(5, "train", plan_file)
    with show_events() as show:
        text = "sampling prompts that were in no picture, and judging them"
        show(StatusChanged(text=text))
        found = judge_lesson(made.model, result)
    known = f"{found.others_before:.2f} before, {found.others_after:.2f} after"
    print_out(f"shapes that it knew, judged by geometry from 0 to 1: {known}")
    print_out(f"picture: {result / 'concept.png'}")
    score = f"{found.before:.2f} before training, {found.after:.2f} after"
    print_out(f"a {new} in new colors, on new backgrounds: {score}")
    return found


def _run(context: click.Context, num_lines: int, *words: object) -> None:
    root, answer = context.find_root(), io.StringIO()
    command = _shown(*words)
    with contextlib.nullcontext() if Progress.is_verbose else contextlib.redirect_stdout(answer):
        status = root.command.main(command, prog_name=root.info_name, standalone_mode=False)
    print_out(answer.getvalue().splitlines()[:num_lines])
    if status:
        raise Exit(status)  # it has said why


def _run_alone(num_lines: int, *words: object) -> None:
    command = [*PYTHON, "-m", "autotune", *_shown(*words)]
    stdout = (2 if sys.stdout is sys.stderr else None) if Progress.is_verbose else subprocess.PIPE
    process = subprocess.Popen(command, stdout=stdout, text=True)
    answer: str | None = None
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # the command got it, too, and says so
            answer, _ = process.communicate()
    print_out((answer or "").splitlines()[:num_lines])
    if process.returncode:
        raise Exit(process.returncode)


def _shown(*words: object) -> list[str]:
    command = [str(word) for word in words]
    print_out(titled_command("$ ", ["autotune", *map(shlex.quote, command)]), style="bold")
    if Progress.is_verbose:
        return ["--progress", Progress.form, "--verbose", *command]
    is_story = Progress.form == "bar" and not sys.stderr.isatty()
    return ["--progress", "none" if is_story else Progress.form, *command]


@app.command()
@click.argument(
    "folders", nargs=-1, type=PATH, metavar="[FOLDER]...", help="Folders to open; by default here."
)
@click.option(
    "--host", default="127.0.0.1", metavar="HOST[:PORT]", help="Where to listen; any free port."
)
@click.option(
    "--token",
    envvar="AUTOTUNE_TOKEN",
    show_envvar=True,
    help="Secret of the address; needed if other machines may come in.",
)
@JSON
def ui(folders: tuple[Path, ...], host: str, token: str | None, as_json: bool) -> None:
    """Open a page for the whole journey in the browser; runs survive it. Ctrl-C ends it."""
    try:
        from autotune.cli import pages  # noqa: F401 - it adds the routes that are served
        from autotune.cli.server import serve
    except ModuleNotFoundError as error:
        hint = "install it: pip install 'lora-autotune[ui]'"
        raise autotune.AutotuneError(f"the page needs {error.name}", hint=hint) from error

    def tell(text: str) -> None:
        if as_json and text.startswith("open "):
            print_json({"address": text.removeprefix("open ")})
        else:
            print_remark(text)

    Progress.after_interrupt = "what it started goes on: open the page again to see it"
    serve([*folders] or [Path()], host, token, tell)
