"""Output of commands: data on stdout, progress and remarks on stderr. Rich is loaded if needed."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from autotune.report.text import with_command

if TYPE_CHECKING:
    from autotune.events import Event

T = TypeVar("T")

JSON_VERSION = 1
"""Grows when a field of what `--json` prints goes, or means something else; not for a new one."""


class Progress:
    """Choices of all commands about progress, and the hint after Ctrl-C."""

    form: ClassVar[str] = "bar"
    is_verbose: ClassVar[bool] = False
    after_interrupt: ClassVar[str] = "run the same command again: what was finished is kept"


def show_events() -> AbstractContextManager[Callable[["Event"], None]]:
    """Make a listener that shows on stderr what long work tells, as `--progress` says."""
    if Progress.form == "json":
        from autotune.events import event_line

        return nullcontext(lambda event: click.echo(event_line(event), err=True))
    if Progress.form == "none":
        return nullcontext(lambda event: None)
    from autotune.cli import terminal

    return terminal.show_events(is_verbose=Progress.is_verbose)


def run_shown(function: Callable[..., T], *given: Any, **asked: Any) -> T:
    """Call what takes long, and show what it tells."""
    with show_events() as show:
        return function(*given, **asked, on_event=show)


def print_out(view: Any, **style: Any) -> None:
    """Print a text, lines, or what rich renders to stdout."""
    from autotune.cli import terminal

    terminal.out.print("\n".join(view) if isinstance(view, list) else view, **style)


def print_remark(text: str, command: str = "") -> None:
    """Print a remark to stderr, apart from the data; a command to copy at its end stays whole."""
    from autotune.cli import terminal

    lines = [f"{text} {command}".rstrip()]
    if command and terminal.err.is_terminal:
        lines = with_command(text, command)
    terminal.err.print("\n".join(lines))


def print_result(result: T, as_json: bool, view: Callable[[T], Any]) -> None:
    """Print a result as JSON, or as `view` makes it for people."""
    if not as_json:
        print_out(view(result))
        return
    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(result, inf_nan_mode="null")
    print_json(plain if isinstance(plain, dict) else {"items": plain})


def print_json(fields: dict[str, Any]) -> None:
    """Print fields as JSON to stdout, with the version of their schema."""
    click.echo(json.dumps({"schema_version": JSON_VERSION, **fields}, indent=1))
