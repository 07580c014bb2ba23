"""Commands that tell about machine and models and change nothing."""

import typer

from autotune.commands.options import Json, echo_json


def doctor(as_json: Json = False) -> None:
    """Tell what on this machine will hurt, worst first, with the fix. Needs no torch; exits 1 if something blocks."""
    from autotune.hardware.doctor import doctor as examine
    from autotune.reporting.hardware import findings_view
    from autotune.terminal import out

    findings = examine()
    if as_json:
        echo_json(findings)
    else:
        out.print(findings_view(findings))
    if any(finding.severity == "blocks" for finding in findings):
        raise typer.Exit(1)


def models(as_json: Json = False) -> None:
    """List the model families that can be planned and trained, with their sizes."""
    from autotune.families.registry import FAMILIES
    from autotune.families.resolve import resolve_model

    specs = {name: resolve_model(name).spec for name in FAMILIES}
    if as_json:
        echo_json(list(specs.values()))
        return
    typer.echo(f"{'family':<24}{'parameters':>11}{'blocks':>8}  by default")
    for name, spec in specs.items():
        usual = FAMILIES[name].defaults
        size = f"{spec.num_parameters / 1e9:>10.2f}B{spec.num_blocks:>8}"
        typer.echo(f"{name:<24}{size}  rank {usual.rank}, {usual.resolution_px} px")
