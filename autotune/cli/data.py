"""`autotune data`: look at training data before training on it."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Caption, Control, Frames, Json, Trigger, tell

app = typer.Typer(help="Look at training data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Look at training data before training on it."""


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Folder of images with same-stem .txt captions.", metavar="DIR")],
    model: Annotated[str, typer.Option(help="Family whose sizes count.")] = "qwen-image",
    resolution: Annotated[int | None, typer.Option(min=1, help="Side of a square image, in pixels.")] = None,
    frames: Frames = None,
    caption: Caption = None,
    trigger: Trigger = None,
    control: Control = None,
    as_json: Json = False,
) -> None:
    """Name every broken, tiny, duplicate or captionless file, and show what training will make of the rest."""
    from autotune.cli.terminal import show_events
    from autotune.data import DatasetOptions, check_dataset
    from autotune.families import family_named
    from autotune.reporting import data_report_lines
    from autotune.schema import Progressed

    family = family_named(model)
    with show_events() as show:
        report = check_dataset(
            folder,
            DatasetOptions(caption, trigger, control, num_frames=frames or family.defaults.num_frames),
            resolution_px=resolution or family.defaults.resolution_px,
            multiple_px=family.size_multiple_px,
            max_side_px=family.max_side_px,
            on_progress=lambda done, total: show(Progressed(name="reading", done=done, total=total)),
        )
    tell(report, as_json, data_report_lines)
    if not report.can_train:
        raise typer.Exit(2)
