"""The command line: parses, calls one function, prints. Nothing heavy is imported before that.

probe ──> plan ──> plan.yaml ──> train
"""

import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from itertools import islice
from typing import Any, NoReturn

import click

from autotune.cli import demo, exchange, options, output  # noqa: F401 - they add commands
from autotune.cli.commands import app
from autotune.errors import InvalidInput, explain_error  # here: later memory may lack for it
from autotune.report.text import folded, printable, without_logins
from autotune.system.process import prepare_process


def main() -> None:
    """Run the command line and exit with the status that errors.py lists."""
    _open_streams()
    sys.unraisablehook = _repeat_interrupt
    loudness, words = _split_loudness(sys.argv[1:])
    named = any(word.partition("=")[0] == "--hardware" for word in words)
    only_predicts = "compare" in words[:1] or (named and words[0] in ("plan", "estimate"))
    prepare_process(only_predicts=only_predicts)
    if only_predicts and words[0] != "compare":  # of one card
        gc.disable()  # it would look through all that is loaded for 2 of 15 s, and free 30 MiB
    words = [*loudness, *words]
    try:
        readable = {word.encode(errors="replace").decode() for word in words}
        if replaced := readable - {*words}:
            hint = "rename the file, or set LC_ALL=C.UTF-8 if the name is in another encoding"
            raise InvalidInput(f"the argument {min(replaced)!r} is not Unicode", hint=hint)
        status = app.main(words, prog_name="autotune", standalone_mode=False)
    except click.Abort:
        status = options.INTERRUPTED
    except click.UsageError as error:
        error.message = without_logins(error.message) + _told_here(error)  # type: ignore[misc]
        error.show(told := io.StringIO())
        _tell(told.getvalue())
        command = error.ctx.command_path if error.ctx else "autotune"
        _exit(error.format_message(), f"{command} --help", error.exit_code)
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("AUTOTUNE_TRACEBACK") or output.Progress.is_verbose:
            sys.stderr.write(without_logins("".join(traceback.format_exception(error))))
        explained = explain_error(error)
        _fail(explained.message, explained.hint, explained.exit_status)
    if status == options.INTERRUPTED:
        _fail("interrupted", output.Progress.after_interrupt, options.INTERRUPTED)
    sys.exit(status)


def _told_here(error: click.UsageError) -> str:
    from autotune.system.files import read_table

    name = error.option_name.lstrip("-") if isinstance(error, click.NoSuchOption) else ""
    if here := read_table("cli/other_names.yaml").get(name.replace("-", "_")):
        return f" Here it is {here}."
    return f" Options have dashes: --{name.replace('_', '-')}." if "_" in name else ""


def _split_loudness(words: Sequence[str]) -> tuple[list[str], list[str]]:
    end = words.index("--") if "--" in words else len(words)
    first: list[str] = []
    others: list[str] = []
    rest = iter(words[:end])
    for word in rest:
        if word == "--progress":
            first += [word, *islice(rest, 1)]
        elif word in ("--quiet", "--verbose") or word.startswith("--progress="):
            first.append(word)
        else:
            others.append(word)
    return first, [*others, *words[end:]]


def _open_streams() -> None:
    # The next file would take the number of a closed one, and what libraries print.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _repeat_interrupt(lost: Any) -> None:
    """Send Ctrl-C again if Python dropped it, as in a weak reference's callback."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Sent to the main thread, as the keyboard does, so that whatever it waits for ends at once.
        main_thread = threading.main_thread().ident, signal.SIGINT
        threading.Timer(0.1, signal.pthread_kill, main_thread).start()
    else:
        sys.__unraisablehook__(lost)


def _fail(message: str, hint: str, status: int) -> NoReturn:
    message, hint = (without_logins(printable(" ".join(text.split()))) for text in (message, hint))
    _tell(f"error: {message}\nhint: {hint}\n")
    _exit(message, hint, status)


def _tell(text: str) -> None:
    # Whole lines are easier to find in a log.
    sys.stderr.write(folded(text) if sys.stderr.isatty() else text)


def _exit(message: str, hint: str, status: int) -> NoReturn:
    """Exit with `status`; a script that reads JSON gets the error on stdout as well."""
    if "--json" in sys.argv:
        told = {"error": message, "hint": hint, "exit_status": status}
        try:
            output.print_json(told)
        except OSError:  # nobody reads, or its disk is full
            _forget_stdout()
    sys.exit(status)


def _forget_stdout() -> None:
    """Keep Python from trying again at its end what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
