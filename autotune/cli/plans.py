"""What can be asked of plan files: `autotune check`, `explain` and `diff`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune.cli.options import Json, PlanFile
from autotune.cli.output import print_remark, print_result


def check(
    plan_file: PlanFile,
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="Another machine: a catalog name or a saved probe; repeat for more."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether a plan fits this machine, or others, without training."""
    from autotune.report.plan import check_lines

    results = {name: autotune.check(plan_file, hardware=name) for name in hardware or ()}
    if not hardware:
        results = {"this machine": autotune.check(plan_file)}
    lines = [
        line
        for name, result in results.items()
        for line in check_lines(result, f"{plan_file}", name)
    ]
    print_result(results if hardware else results["this machine"], as_json, lambda _: lines)
    if not all(result.fits for result in results.values()):
        where = "for such a machine" if hardware else "for this machine"
        there = " --hardware NAME" if hardware else ""
        print_remark(
            f"hint: make one {where}:", f"autotune plan --from {shlex.quote(str(plan_file))}{there}"
        )
        raise typer.Exit(4)


def explain(plan_file: PlanFile, as_json: Json = False) -> None:
    """Say why each setting was chosen, and what was rejected and why."""
    from autotune.report.plan import explain_lines, origin_lines

    plan = autotune.load_plan(plan_file)
    lines = explain_lines, origin_lines
    print_result(plan.frozen.reasons, as_json, lambda _: [*lines[0](plan), "", *lines[1](plan)])


def report(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Plan files or folders of runs; several side by side.", metavar="WHAT..."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; by default report.html, in a single run's folder.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page about plans or runs."""
    written = autotune.report(*subjects, path=output)
    print_result(
        {"path": str(written)}, as_json, lambda _: f"written to {written}; open it in a browser"
    )


def diff(
    first: Annotated[Path, typer.Argument(help="A plan.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another plan.", metavar="B")],
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Price of an hour of one GPU, to compare costs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two plans: settings, memory, time and cost."""
    from autotune.report.plan import difference_lines, differences

    plans = autotune.load_plan(first), autotune.load_plan(second)
    print_result(differences(*plans, price_per_hour=price), as_json, difference_lines)
