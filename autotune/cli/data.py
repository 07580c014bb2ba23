"""`autotune data`: look at training data before training on it."""

from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune import reporting
from autotune.cli.options import Caption, Control, Frames, Json, Trigger
from autotune.cli.output import print_result, show_events

app = typer.Typer(help="Look at training data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Look at training data before training on it."""


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Folder of images with same-stem .txt captions.", metavar="DIR")],
    model: Annotated[str, typer.Option(help="Family whose sizes count.")] = "qwen-image",
    resolution: Annotated[int | None, typer.Option(min=1, help="Side of a square image, in pixels.")] = None,
    num_frames: Frames = None,
    caption: Caption = None,
    trigger: Trigger = None,
    control: Control = None,
    as_json: Json = False,
) -> None:
    """Name every broken, tiny, duplicate or captionless file, and show what training will make of the rest."""
    with show_events() as show:
        report = autotune.check_data(
            folder,
            model=model,
            resolution_px=resolution,
            num_frames=num_frames,
            caption=caption,
            trigger=trigger,
            control=control,
            on_event=show,
        )
    print_result(report, as_json, reporting.data_report_lines)
    if not report.can_train:
        raise typer.Exit(2)
