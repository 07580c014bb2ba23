"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Trigger = Annotated[str | None, typer.Option(help="Word put in front of every caption that lacks it.")]
Caption = Annotated[str | None, typer.Option(help="Caption of images that have none.")]
Control = Annotated[Path | None, typer.Option(help="Folder of control images, for edit models.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate of the job.")]
Sampling = Annotated[
    str | None, typer.Option("--timestep-sampling", help="Noise levels: logit_normal (default) or uniform.")
]
Shift = Annotated[str | None, typer.Option("--timestep-shift", help="Of the noise levels: a number, or by_resolution.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Of guidance-distilled models, in training.")]
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
