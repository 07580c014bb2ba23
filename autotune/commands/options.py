"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]
