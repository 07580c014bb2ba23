"""Commands that tell about machine and models and change nothing."""

import typer

import autotune
from autotune import reporting
from autotune.cli.options import Json
from autotune.cli.output import print_result, show_events


def doctor(as_json: Json = False) -> None:
    """Tell what on this machine will hurt, worst first, with the fix. Needs no torch; exits 1 if something blocks."""
    findings = autotune.doctor()
    print_result(findings, as_json, reporting.findings_view)
    if any(finding.severity == "blocks" for finding in findings):
        raise typer.Exit(1)


def models(as_json: Json = False) -> None:
    """List the model families that can be planned and trained, with their sizes."""
    with show_events() as show:
        show(autotune.StatusChanged(text="counting parameters"))
        found = autotune.list_models()
    print_result(found, as_json, reporting.model_lines)
