"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]


def parse_shift(text: str | None) -> Any:
    """A timestep shift as a job has it.

    Raises:
        BadParameter: it is neither a positive number nor `by_resolution`.
    """
    if text is None or text == "by_resolution":
        return text
    try:
        shift = float(text)
    except ValueError:
        shift = 0.0
    if not 0 < shift < float("inf"):
        raise typer.BadParameter(
            f"{text!r} is neither a number above 0 nor by_resolution", param_hint="--timestep-shift"
        )
    return shift
