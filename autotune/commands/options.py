"""Options and arguments that several commands have, and how a command takes many of them.

@dataclass(frozen=True, kw_only=True)
class Options:
    rank: Rank = None

@takes(Options)
def command(asked: Options) -> None: ...
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]
Control = Annotated[Path | None, typer.Option(help="Folder of control images, for edit models.")]
Caption = Annotated[str | None, typer.Option(help="Caption of images that have none.")]
Trigger = Annotated[str | None, typer.Option(help="Word put in front of every caption that lacks it.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate of the job.")]
Sampling = Annotated[
    str | None, typer.Option("--timestep-sampling", help="Noise levels: logit_normal (default) or uniform.")
]
Shift = Annotated[str | None, typer.Option("--timestep-shift", help="Of the noise levels: a number, or by_resolution.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Of guidance-distilled models, in training.")]
Resolution = Annotated[str | None, typer.Option(help="Side of a square in pixels, or WIDTHxHEIGHT.")]
Frames = Annotated[int | None, typer.Option(min=1, help="Frames of a clip, for video models.")]
Rank = Annotated[int | None, typer.Option(min=1, max=4096, help="Rank of the adapter.")]
Targets = Annotated[str | None, typer.Option(help="attention (default), attention+mlp or all-linear.")]
Batch = Annotated[int | None, typer.Option(min=1, max=65536, help="Images per optimizer step (effective batch).")]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the job.")]
Price = Annotated[float | None, typer.Option(min=0, max=1e6, help="Price of an hour, for the cost of the job.")]


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command whose options are the fields of a dataclass, each annotated with its `typer.Option`."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]

    def command_of(run: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(options(**values))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return command_of


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
