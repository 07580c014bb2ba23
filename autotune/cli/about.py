"""Commands that tell about machine and models and change nothing."""

from typing import TYPE_CHECKING

import typer

from autotune.cli.options import Json, tell

if TYPE_CHECKING:
    from autotune.schema import ModelSpec


def doctor(as_json: Json = False) -> None:
    """Tell what on this machine will hurt, worst first, with the fix. Needs no torch; exits 1 if something blocks."""
    from autotune.hardware import diagnose
    from autotune.reporting import findings_view

    findings = diagnose()
    tell(findings, as_json, findings_view)
    if any(finding.severity == "blocks" for finding in findings):
        raise typer.Exit(1)


def models(as_json: Json = False) -> None:
    """List the model families that can be planned and trained, with their sizes."""
    from autotune.cli.terminal import err
    from autotune.families import FAMILIES, resolve_model

    with err.status("counting parameters"):
        specs = [resolve_model(name).spec for name in FAMILIES]
    tell(specs, as_json, _model_lines)


def _model_lines(specs: "list[ModelSpec]") -> list[str]:
    from autotune.families import FAMILIES

    lines = [f"{'family':<24}{'parameters':>11}{'blocks':>8}  by default"]
    for spec in specs:
        usual = FAMILIES[spec.family].defaults
        size = f"{spec.num_parameters / 1e9:>10.2f}B{spec.num_blocks:>8}"
        lines.append(f"{spec.family:<24}{size}  rank {usual.rank}, {usual.resolution_px} px")
    return lines
