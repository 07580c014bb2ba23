"""`autotune data`: look at training data before training on it."""

from dataclasses import dataclass
from pathlib import Path

import typer

import autotune
from autotune.cli.options import DataOptions, Json, argument, given, option, takes
from autotune.cli.output import print_result, show_events

app = typer.Typer(help="Look at training data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Look at training data before training on it."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `autotune data check` can be asked beside how the data is read; the names are those
    of `check_data`."""

    folder: list[Path] = argument(
        "Folders of images with same-stem .txt captions, or a data.yaml.", metavar="DIR..."
    )
    model: str = option("Family whose sizes count.", default="qwen-image")
    resolution_px: int | None = option("Side of a square image, in pixels.", "--resolution", min=1)
    num_frames: int | None = option("Frames of a clip, for video models.", "--frames", min=1)
    strict: bool = option("Exit with 2 on any problem.", "--strict", default=False)
    as_json: Json = False


@app.command()
@takes(CheckOptions, DataOptions)
def check(options: CheckOptions, data: DataOptions) -> None:
    """Name every broken, tiny, duplicate or captionless file, and show what training will make
    of the rest."""
    from autotune.report.machine import data_report_lines

    with show_events() as show:
        report = autotune.check_data(
            tuple(map(str, options.folder)),
            **given(options, but=("as_json", "strict", "folder")),
            **data.values(),
            on_event=show,
        )
    print_result(report, options.as_json, data_report_lines)
    if not (report.is_clean if options.strict else report.can_train):
        raise typer.Exit(2)
