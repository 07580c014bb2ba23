"""`autotune weights`: look into safetensors files, convert adapters between programs."""

from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune.cli.options import Json, one_of
from autotune.cli.output import print_out, print_result, show_events

app = typer.Typer(
    help="Inspect and convert weight files.", no_args_is_help=True, rich_markup_mode=None
)
FORMATS = ("diffusers", "comfyui", "kohya")


@app.command()
def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="A safetensors file; or a model: its folder or index.", metavar="FILE"),
    ],
    no_values: Annotated[
        bool, typer.Option("--no-values", help="Read headers only: instant at any size.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show keys, shapes, dtypes, metadata, size, and how many values are NaN or infinite."""
    from autotune.report.machine import weights_lines

    with show_events() as show:
        summary = autotune.inspect_weights(file, count_values=not no_values, on_event=show)
    print_result(summary, as_json, weights_lines)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="An adapter.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="File to write.", metavar="OUT")],
    to: Annotated[str, typer.Option("--format", help="diffusers, comfyui or kohya.")] = "diffusers",
    model: Annotated[
        str | None, typer.Option(help="Family of the adapter, if its names do not show it.")
    ] = None,
) -> None:
    """Write an adapter under the names that another program loads.

    Weights and alphas stay the same.
    """
    one_of("--format", to, FORMATS)
    autotune.convert_weights(source, target, to=to, model=model)
    print_out(f"written to {target}")
