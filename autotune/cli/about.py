"""Commands that tell about machine and models, and fetch them."""

from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune.cli.options import Json
from autotune.cli.output import print_remark, print_result, show_events


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="Facts only; measure nothing.")] = False,
    list_catalog: Annotated[
        bool, typer.Option("--list", help="Show the catalog of GPUs instead.")
    ] = False,
    device: Annotated[
        int | None,
        typer.Option(min=0, help="Which GPU, if there are several; the largest by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find out what this machine can really do, and keep the answer."""
    from autotune.report.machine import catalog_view, profile_view

    if list_catalog:
        print_result(autotune.list_gpus(), as_json, catalog_view)
        return
    with show_events() as show:
        profile = autotune.probe(quick=quick, device=device, on_event=show)
    print_result(profile, as_json, profile_view)


def doctor(as_json: Json = False) -> None:
    """Find what is wrong with this machine, and the fix, worst first. Needs no torch; exits 1 if
    something blocks."""
    from autotune.report.machine import findings_view

    findings = autotune.doctor()
    print_result(findings, as_json, findings_view)
    if any(finding.severity == "blocks" for finding in findings):
        raise typer.Exit(1)


def models(
    hardware: Annotated[
        str | None, typer.Option(help="Show what fits this GPU, e.g. 4090 (see probe --list).")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--model", help="Show which of them a single file is.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models that can be planned and trained; with --hardware, what a GPU is predicted
    to do with each."""
    from autotune.report.machine import model_lines

    found = autotune.list_models(hardware, file=file)
    print_result(found, as_json, lambda models: model_lines(models, hardware))
    if file is not None and len(found) > 1:
        print_remark(
            f"only its name tells these apart: without --base, {file.name} is taken for "
            f"{found[0].name}"
        )


def fetch(
    model: Annotated[
        str, typer.Option(help="A known name or a hub id, with @REVISION for a particular commit.")
    ],
    as_json: Json = False,
) -> None:
    """Download a model and verify its files, so that plan and train need no network."""
    from autotune.report.machine import fetched_lines

    with show_events() as show:
        fetched = autotune.fetch(model, on_event=show)
    print_result(fetched, as_json, fetched_lines)
