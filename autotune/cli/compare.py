"""`autotune compare`: one job on several GPUs that nobody here needs to own."""

import re
from dataclasses import dataclass
from pathlib import Path

import typer

import autotune
from autotune.cli.options import REQUIRED, Data, Json, ShapeOptions, given, one_of, option, takes
from autotune.cli.output import print_result, show_events


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What `autotune compare` can be asked; the names are those of `autotune.compare`. None: not
    given."""

    model: str = option(
        "A known model's name, a folder in the diffusers layout, or a hub id.", default=REQUIRED
    )
    data: Data = None
    hardware: str = option("GPUs of the catalog, separated by commas, or all.", default="all")
    prices: Path | None = option(
        "YAML: what an hour of each GPU costs (docs/prices.yaml).", "--price-file"
    )
    max_cost: float | None = option("Leave out what costs more.", "--under", min=0)
    within: str | None = option("Leave out what takes longer, e.g. 2h, 90min.")
    quality: str | None = option("As for plan: exact, high (default) or compact.")
    num_steps: int | None = option("Optimizer steps of the job.", "--steps", min=1)
    as_json: Json = False


@takes(CompareOptions, ShapeOptions)
def compare(options: CompareOptions, shape: ShapeOptions) -> None:
    """Predict one job on several GPUs: settings, speed, hours and cost of the finished adapter."""
    from autotune.report.machine import comparison_lines

    one_of("--quality", options.quality, ("exact", "high", "compact"))
    arguments = given(options, but=("as_json", "within")) | given(shape)
    max_hours = None if options.within is None else _hours(options.within)
    with show_events() as show:
        found = autotune.compare(max_hours=max_hours, on_event=show, **arguments)
    print_result(found, options.as_json, comparison_lines)


def _hours(text: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d+)?)\s*(h|hours?|m|min|minutes?)\s*", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a time such as 2h or 90min", param_hint="--within"
        )
    return float(match.group(1)) / (1 if match.group(2).startswith("h") else 60)
