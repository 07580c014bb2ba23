"""`autotune weights`: look into safetensors files and convert adapters between the keys that programs use."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Inspect and convert weight files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Inspect and convert weight files."""


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A safetensors file.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Show keys, shapes, dtypes, metadata, size, and how many values are NaN or infinite."""
    from autotune.reporting.weights import render_file
    from autotune.weights.inspection import inspect_file

    summary = inspect_file(file)
    typer.echo(summary.model_dump_json(indent=1) if as_json else render_file(summary))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="An adapter in any of the formats.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="Where to write it.", metavar="OUT")],
    to: Annotated[str, typer.Option("--format", help="diffusers, comfyui or kohya.")] = "diffusers",
    model: Annotated[str | None, typer.Option(help="Family, for a kohya file that another program wrote.")] = None,
) -> None:
    """Convert an adapter to the keys that another program loads; weights and alphas stay the same."""
    from autotune.weights.adapters import AdapterFormat, read_adapter, write_adapter

    formats = AdapterFormat.__args__  # type: ignore[attr-defined]
    if to not in formats:
        raise typer.BadParameter(f"{to!r} is not one of {', '.join(formats)}", param_hint="--format")
    write_adapter(target, read_adapter(source, _module_names(model)), to)  # type: ignore[arg-type]
    typer.echo(f"written to {target}")


def _module_names(model: str | None) -> tuple[str, ...]:
    if model is None:
        return ()
    from autotune.families.resolve import build_on_meta, resolve_model

    resolved = resolve_model(model)
    return tuple(name for name, _ in build_on_meta(resolved.family, resolved.config).named_modules())
