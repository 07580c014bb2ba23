"""`autotune probe`: what this machine can do."""

from typing import Annotated

import typer

import autotune
from autotune import reporting
from autotune.cli.options import Json
from autotune.cli.output import print_result, show_events


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="Facts only; measure nothing.")] = False,
    list_catalog: Annotated[bool, typer.Option("--list", help="Show the catalog of GPUs instead.")] = False,
    device: Annotated[
        int | None, typer.Option(min=0, help="Which GPU, if there are several; the largest by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find out what this machine can really do, and keep the answer."""
    if list_catalog:
        print_result(autotune.list_gpus(), as_json, reporting.catalog_view)
        return
    with show_events() as show:
        profile = autotune.probe(quick=quick, device=device, on_event=show)
    print_result(profile, as_json, reporting.profile_view)
