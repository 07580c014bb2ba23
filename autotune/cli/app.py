"""The command line: parses, calls one function, prints. Imports nothing heavy before a command
runs.

probe ──> plan ──> plan.yaml ──> train
"""

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import autotune
from autotune.cli import data, profiles, weights
from autotune.cli.about import doctor, fetch, models, probe
from autotune.cli.compare import compare
from autotune.cli.configs import audit, export_config, import_config
from autotune.cli.demo import demo
from autotune.cli.estimate import estimate
from autotune.cli.options import one_of
from autotune.cli.output import Progress
from autotune.cli.plan import plan
from autotune.cli.plans import check, diff, explain, report
from autotune.cli.train import sample, train
from autotune.report.text import printable, wrapped

INTERRUPTED = 130
"""Exit status of typer on Ctrl-C."""

UsageError: Any = typer.BadParameter.__base__
"""Click's error for wrong usage. Typer exports only a subclass of it, and since 0.26 has a click
of its own."""

app = typer.Typer(
    help=(
        "Measures which settings train a diffusion-model LoRA fastest on this machine, and "
        "freezes "
        "them into a plan."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    progress: Annotated[
        str, typer.Option(help="On stderr: bar, json (a line for each event) or none.")
    ] = "bar",
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress; may stand after a command, too.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Every step, reason and traceback; after a command, too."),
    ] = False,
) -> None:
    """Options that stand before a command."""
    one_of("--progress", progress, ("bar", "json", "none"))
    if quiet and verbose:
        raise typer.BadParameter("it cannot be --quiet as well", param_hint="--verbose")
    Progress.form = "none" if quiet else progress
    Progress.is_verbose = verbose
    if version:
        typer.echo(f"autotune {autotune.__version__}")
        raise typer.Exit


PLANS = (probe, doctor, models, fetch, estimate, compare, plan, check, explain, diff, report)
for command in (*PLANS, train, sample, demo, import_config, export_config, audit):
    app.command()(command)
for name, group in (("data", data.app), ("profiles", profiles.app), ("weights", weights.app)):
    app.add_typer(group, name=name)
for listing in (app, data.app, profiles.app, weights.app):
    for listed in listing.registered_commands:
        listed.short_help = (listed.callback.__doc__ or "").partition("\n\n")[
            0
        ]  # whole: by default it is cut off


def main() -> None:
    """Run the command line and exit with the status that errors.py lists."""
    _open_streams()
    sys.unraisablehook = _repeat_interrupt
    autotune.prepare_process(only_predicts=_only_predicts(sys.argv[1:]))
    explain, _ = (
        autotune.explain_error,
        printable,
    )  # when memory has run out, nothing can be imported
    try:
        status = app(
            args=_with_loudness_first(sys.argv[1:]), standalone_mode=False, prog_name="autotune"
        )
    except UsageError as error:
        error.message = _hide_logins(error.message) + _told_here(error)
        error.show()
        _exit(
            error.format_message(),
            f"{error.ctx.command_path if error.ctx else 'autotune'} --help",
            error.exit_code,
        )
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("AUTOTUNE_TRACEBACK") or Progress.is_verbose:
            sys.stderr.write(_hide_logins("".join(traceback.format_exception(error))))
        explained = explain(error)
        _fail(explained.message, explained.hint, explained.exit_status)
    if status == INTERRUPTED:
        _fail("interrupted", Progress.after_interrupt, INTERRUPTED)
    sys.exit(status)


OTHER_NAMES = {
    "train_batch_size": "--batch-size, which is the effective batch; the micro-batch is tuned",
    "gradient_accumulation_steps": "found by the search; --batch-size is the effective batch",
    "max_train_steps": "--steps",
    "num_train_epochs": "--epochs",
    "max_train_epochs": "--epochs",
    "network_dim": "--rank",
    "network_alpha": "--alpha",
    "lora_rank": "--rank",
    "lora_alpha": "--alpha",
    "lora_dropout": "--dropout",
    "mixed_precision": "--pin precision=bf16 or fp16",
    "gradient_checkpointing": "found by the search; --pin checkpointed_blocks=NUMBER",
    "blocks_to_swap": "found by the search; --pin swapped_blocks=NUMBER",
    "xformers": "found by the search; --pin attention=NAME",
    "use_8bit_adam": "--optimizer adamw-8bit",
    "resume_from_checkpoint": "--resume",
    "pretrained_model_name_or_path": "--model",
    "instance_data_dir": "--data",
    "train_data_dir": "--data",
    "instance_prompt": "--caption",
    "validation_prompt": "--preview-prompt",
    "output_dir": "--output of train, --run-output of plan",
    "report_to": "`report_to` in the plan's job",
    "lr": "--learning-rate",
    "frames_per_clip": "--frames",
}
"""What options of other trainers are called here."""


def _told_here(error: Any) -> str:
    """What an unknown option is called here, if it is another trainer's or has underscores."""
    name = (getattr(error, "option_name", None) or "").lstrip("-")
    if here := OTHER_NAMES.get(name.replace("-", "_")):
        return f" Here it is {here}."
    return f" Options have dashes: --{name.replace('_', '-')}." if "_" in name else ""


def _only_predicts(words: Sequence[str]) -> bool:
    """Whether the command neither trains nor tries anything: it asks about hardware by name."""
    named = any(word.partition("=")[0] == "--hardware" for word in words)
    return "compare" in words[:1] or (named and words[0] in ("plan", "estimate"))


def _with_loudness_first(words: Sequence[str]) -> list[str]:
    """The arguments with `--quiet` and `--verbose` where options of all commands stand, wherever
    they were typed."""
    end = words.index("--") if "--" in words else len(words)
    moved = [word for word in words[:end] if word in ("--quiet", "--verbose")]
    return [*moved, *(word for word in words[:end] if word not in moved), *words[end:]]


def _open_streams() -> None:
    """Open streams that were closed: the next file would take their number, and what libraries
    print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _repeat_interrupt(lost: Any) -> None:
    """Send Ctrl-C again if it was raised in a weak reference's callback (tracing makes many):
    Python drops it."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Sent to the main thread, as the keyboard does, so that whatever it waits for ends at once.
        threading.Timer(
            0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
    else:
        sys.__unraisablehook__(lost)


def _fail(message: str, hint: str, status: int) -> NoReturn:
    message, hint = (_hide_logins(printable(" ".join(text.split()))) for text in (message, hint))
    for line in (f"error: {message}", f"hint: {hint}"):  # whole lines are easier to find in a log
        shown = wrapped(line, 4) if sys.stderr.isatty() else [line]
        sys.stderr.write("".join(f"{part}\n" for part in shown))
    _exit(message, hint, status)


def _hide_logins(text: str) -> str:
    """`text` with `***` for what may be a name and a password, or a token, in something like a
    URL: mistyped ones come to here."""
    text = re.sub(r"\b([A-Za-z][\w+.-]*:[/\\]+)\S*@", r"\1***@", text)
    text = re.sub(
        r"\b([A-Za-z][\w+.-]+:[/\\]+[^\s?#;]*)[?#;]\S+?(?=[\"'),.:]*(\s|$))", r"\1***", text
    )
    return re.sub(r"[^\s'\"/=]+:[^\s/]*@(?=\w)", "***@", text)


def _exit(message: str, hint: str, status: int) -> NoReturn:
    """Exit with `status`; a script that reads JSON gets the error on stdout as well."""
    if "--json" in sys.argv:
        try:
            typer.echo(
                json.dumps({"error": message, "hint": hint, "exit_status": status}, indent=1)
            )
        except OSError:  # nobody reads, or its disk is full
            _forget_stdout()
    sys.exit(status)


def _forget_stdout() -> None:
    """Make Python not try again at its end what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
