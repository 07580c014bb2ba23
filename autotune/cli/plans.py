"""What can be asked of plan files: `autotune check`, `explain` and `diff`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune import reporting
from autotune.cli.options import Json, PlanFile
from autotune.cli.output import print_remark, print_result


def check(plan_file: PlanFile, as_json: Json = False) -> None:
    """Tell whether a plan fits this machine, without training."""
    result = autotune.check(plan_file)
    print_result(result, as_json, lambda _: reporting.check_lines(result, f"{plan_file}"))
    if not result.fits:
        print_remark(f"hint: make one for this machine: autotune plan --from {shlex.quote(str(plan_file))}")
        raise typer.Exit(4)


def explain(plan_file: PlanFile, as_json: Json = False) -> None:
    """Say why each setting was chosen, and what was rejected and why."""
    plan = autotune.load_plan(plan_file)
    lines = reporting.explain_lines, reporting.origin_lines
    print_result(plan.frozen.reasons, as_json, lambda _: [*lines[0](plan), "", *lines[1](plan)])


def diff(
    first: Annotated[Path, typer.Argument(help="A plan.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another plan.", metavar="B")],
    price: Annotated[float | None, typer.Option(min=0, max=1e6, help="Price of an hour, to compare costs.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two plans: settings, memory, time and cost."""
    plans = autotune.load_plan(first), autotune.load_plan(second)
    print_result(reporting.differences(*plans, price_per_hour=price), as_json, reporting.difference_lines)
