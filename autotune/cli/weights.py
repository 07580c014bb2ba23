"""`autotune weights`: look into safetensors files, convert adapters between programs, write models in shards."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from autotune.cli.options import Json, one_of, tell

app = typer.Typer(help="Inspect and convert weight files.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A safetensors file; or a model: its folder or index.", metavar="FILE")],
    no_values: Annotated[bool, typer.Option("--no-values", help="Read headers only: instant at any size.")] = False,
    as_json: Json = False,
) -> None:
    """Show keys, shapes, dtypes, metadata, size, and how many values are NaN or infinite."""
    from autotune.cli.terminal import err
    from autotune.reporting import memory_text, render_file
    from autotune.weights import inspect_file

    with err.status("counting NaN and infinite values") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"counting NaN and infinite values: {memory_text(done)} of {memory_text(total)}")

        summary = inspect_file(file, values=not no_values, on_progress=progress)
    tell(summary, as_json, render_file)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="An adapter; or a model: its folder or index of shards.", metavar="IN")
    ],
    target: Annotated[Path, typer.Argument(help="File to write; for a model, a folder.", metavar="OUT")],
    to: Annotated[str, typer.Option("--format", help="diffusers, comfyui or kohya; a model: diffusers.")] = "diffusers",
    model: Annotated[str | None, typer.Option(help="Family of an adapter whose names do not tell it.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a model's files.", metavar="SIZE")] = "10GB",
) -> None:
    """Write an adapter under the names that another program loads, or a model in shards.

    Weights and alphas stay the same.
    """
    from autotune.cli.machine import parse_bytes
    from autotune.cli.terminal import out
    from autotune.errors import InvalidInput
    from autotune.families import build_on_meta, resolve_model
    from autotune.weights import AdapterFormat, is_model_path, read_adapter, reshard, write_adapter

    one_of("--format", to, get_args(AdapterFormat))
    if is_model_path(source):
        if to != "diffusers":
            raise InvalidInput(f"only adapters are written for {to}", hint="leave --format out, or name an adapter")
        written = reshard(source, target, max_shard_bytes=parse_bytes(max_shard_size))
        out.print(f"{len(written)} file{'s' if len(written) > 1 else ''} written to {target}")
        return
    named = resolve_model(model) if model else None
    modules = build_on_meta(named.family, named.config).named_modules() if named else ()
    adapter = read_adapter(source, [name for name, _ in modules])
    write_adapter(target, adapter, to, named.family.transformer_class if named else None)  # type: ignore[arg-type]
    out.print(f"written to {target}")
