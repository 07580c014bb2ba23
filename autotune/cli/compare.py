"""`autotune compare`: one job on several GPUs that nobody here needs to own."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune import reporting
from autotune.cli.options import Batch, Data, Frames, Json, Rank, Resolution, Steps, Targets, given, one_of, takes
from autotune.cli.output import print_result, show_events


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What `autotune compare` can be asked; the names are those of `autotune.compare`. None: not given."""

    model: Annotated[str, typer.Option(help="A known model's name, a folder in the diffusers layout, or a hub id.")]
    data: Data = None
    hardware: Annotated[str, typer.Option(help="GPUs of the catalog with commas between, or all.")] = "all"
    prices: Annotated[
        Path | None, typer.Option("--price-file", help="YAML: what an hour of each GPU costs (docs/prices.yaml).")
    ] = None
    max_cost: Annotated[float | None, typer.Option("--under", min=0, help="Leave out what costs more.")] = None
    within: Annotated[str | None, typer.Option(help="Leave out what takes longer, e.g. 2h, 90min.")] = None
    order: Annotated[str | None, typer.Option("--sort", help="cost, hours or name; the cheapest or fastest first.")] = (
        None
    )
    download_rate: Annotated[
        str | None, typer.Option(help="Bytes a second at which the model arrives; default 100MB.")
    ] = None
    resolution: Resolution = None
    num_frames: Frames = None
    rank: Rank = None
    targets: Targets = None
    effective_batch_size: Batch = None
    quality: Annotated[str | None, typer.Option(help="As for plan: exact, high (default) or compact.")] = None
    num_steps: Steps = None
    as_json: Json = False


@takes(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Predict one job on several GPUs: settings, speed, hours and cost of the finished adapter."""
    one_of("--sort", options.order, ("cost", "hours", "name"))
    one_of("--quality", options.quality, ("exact", "high", "compact"))
    arguments = given(options, but=("as_json", "within"))
    max_hours = None if options.within is None else _hours(options.within)
    with show_events() as show:
        found = autotune.compare(max_hours=max_hours, on_event=show, **arguments)
    print_result(found, options.as_json, reporting.comparison_lines)


def _hours(text: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d+)?)\s*(h|hours?|m|min|minutes?)\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 2h or 90min", param_hint="--within")
    return float(match.group(1)) / (1 if match.group(2).startswith("h") else 60)
