"""The command line: parses, calls one function, prints. Imports nothing heavy before a command runs.

probe ──> plan ──> plan.yaml ──> train
"""

import json
import os
import signal
import sys
import threading
from typing import Annotated, Any, NoReturn

import typer

from autotune.cli import data, profiles, weights
from autotune.cli.about import doctor, models
from autotune.cli.demo import demo
from autotune.cli.estimate import estimate
from autotune.cli.plan import plan
from autotune.cli.plans import check, diff, explain
from autotune.cli.probe import probe
from autotune.cli.train import sample, train
from autotune.errors import AutotuneError, Preempted, first_line
from autotune.reporting import printable
from autotune.runtime import is_first_process, is_out_of_memory, limit_thread_spinning, silence_libraries

INTERRUPTED = 130
"""What typer ends with on Ctrl-C."""

UsageError: Any = typer.BadParameter.__base__
"""Typer exports only this subclass of click's, and since 0.26 has a click of its own."""

app = typer.Typer(
    help="Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them into a plan.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Options that stand before a command."""
    if version:
        from autotune import __version__

        typer.echo(f"autotune {__version__}")
        raise typer.Exit


for command in (probe, doctor, models, estimate, plan, check, explain, diff, train, sample, demo):
    app.command()(command)
for name, group in (("data", data.app), ("profiles", profiles.app), ("weights", weights.app)):
    app.add_typer(group, name=name)
for listing in (app, data.app, profiles.app, weights.app):
    for listed in listing.registered_commands:
        listed.short_help = (listed.callback.__doc__ or "").partition("\n\n")[0]  # whole: by default it is cut off


def main() -> None:
    """Run the command line and exit with the status that errors.py lists."""
    _open_streams()
    sys.unraisablehook = _again
    silence_libraries()
    limit_thread_spinning(os.environ)
    try:
        status = app(standalone_mode=False, prog_name="autotune")
    except UsageError as error:
        error.show()
        _exit(error.format_message(), f"{error.ctx.command_path if error.ctx else 'autotune'} --help", error.exit_code)
    except AutotuneError as error:
        if isinstance(error, Preempted) and not is_first_process():
            sys.exit(error.exit_status)  # the first of several processes says it
        _fail(error.message, error.hint, error.exit_status)
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("AUTOTUNE_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.strerror:
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror}", "check the path, its permissions, and the room on its disk", 1)
        if is_out_of_memory(error):
            _fail(f"memory ran out: {error}", "close what else takes memory, or raise the limit (ulimit -v)", 1)
        _fail(
            f"{type(error).__name__}: {first_line(error) or 'no message'}",
            "this is a bug in autotune; AUTOTUNE_TRACEBACK=1 shows where. Please report it",
            1,
        )
    if status == INTERRUPTED:
        _fail("interrupted", "run the same command again: what was finished is kept", INTERRUPTED)
    sys.exit(status)


def _open_streams() -> None:
    """Where a stream was closed, the next file to be opened would take its number, and what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _again(lost: Any) -> None:
    """Python drops what is raised in a weak reference's callback, of which tracing makes many: Ctrl-C comes again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Sent to the thread itself, as the keyboard does: what it waits for ends at once.
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def _fail(message: str, hint: str, status: int) -> NoReturn:
    message, hint = (printable(" ".join(text.split())) for text in (message, hint))
    sys.stderr.write(f"error: {message}\nhint: {hint}\n")
    _exit(message, hint, status)


def _exit(message: str, hint: str, status: int) -> NoReturn:
    """End with `status`; a script that reads JSON finds there what people read on stderr."""
    if "--json" in sys.argv and is_first_process():
        try:
            typer.echo(json.dumps({"error": message, "hint": hint, "exit_status": status}, indent=1))
        except OSError:  # nobody reads, or its disk is full
            _forget_stdout()
    sys.exit(status)


def _forget_stdout() -> None:
    """What could not be written is not tried again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
