"""Writes docs/reference.md from the commands themselves: python -m tests.docs.reference"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from autotune.cli.app import app
from autotune.cli.options import RequestCommand

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
INTRODUCTION = """# Commands and options

Every command with its options, as `--help` shows them; the page is generated from the program.
`autotune.plan` and the other functions of Python take the same under the names in the second
column. `--progress`, `--quiet` and `--verbose` may stand anywhere.
"""


def markdown() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *_lines(app, "autotune")])


def _lines(command: click.Command, words: str) -> Iterator[str]:
    context = click.Context(command, info_name=words, show_default=True)
    usage = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "")
    yield from (f"## {words}{usage}", "", _in_cell(command.help), "")
    parameters = [one for one in command.get_params(context) if "--help" not in one.opts]
    section = command.section if isinstance(command, RequestCommand) else lambda _: "Options"
    for title, members in groupby(parameters, section):
        is_python = title != "Options"
        yield f"| {title} |{' Python |' * is_python} value | default | |"
        yield f"|---|{'---|' * is_python}---|---|---|"
        yield from (_row(one, context, is_python=is_python) for one in members)
        yield ""
    for name, below in getattr(command, "commands", {}).items():
        yield from _lines(below, f"{words} {name}")


def _row(parameter: click.Parameter, context: click.Context, *, is_python: bool) -> str:
    cells = [f"`{parameter.name}`"] if is_python else []
    kind = parameter.make_metavar(context).replace("INTEGER", "INT").removesuffix(" RANGE")
    if isinstance(parameter, click.Argument):
        cells = [f"`{kind}`", *cells, "", ""]
    else:
        extra = parameter.get_help_extra(context)
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        told = [extra.get("default", ""), extra.get("required", "")]
        told += [f"`{name}`" for name in extra.get("envvars", ())]
        value = "" if parameter.is_flag else f"{kind} {extra.get('range', '')}".strip()
        cells = [names, *cells, value, " ".join(filter(None, told))]
    cells.append(parameter.help)
    return f"| {' | '.join(map(_in_cell, cells))} |"


def _in_cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(markdown())
