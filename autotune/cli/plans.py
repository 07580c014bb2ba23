"""What can be asked of plan files: `autotune check`, `explain` and `diff`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, PlanFile, tell


def check(plan_file: PlanFile, as_json: Json = False) -> None:
    """Tell whether a plan fits this machine, without training."""
    from autotune.cli.terminal import err
    from autotune.hardware import probe as read_machine
    from autotune.reporting import wrapped
    from autotune.schema import read_plan
    from autotune.training import card_misfits, hardware_misfits

    chosen, machine = read_plan(plan_file), read_machine()
    misfits = hardware_misfits(chosen, machine) + card_misfits(chosen, machine)
    told = [line for misfit in misfits for line in wrapped(f"does not fit: {misfit}")]
    fine = f"{plan_file} is valid and fits this machine"
    tell({"fits": not misfits, "misfits": misfits}, as_json, lambda _: told or fine)
    if misfits:
        err.print(f"hint: make one for this machine: autotune plan --from {shlex.quote(str(plan_file))}")
        raise typer.Exit(4)


def explain(plan_file: PlanFile, as_json: Json = False) -> None:
    """Say why each setting was chosen, and what was rejected and why."""
    from autotune.reporting import explain_lines, origin_lines
    from autotune.schema import read_plan

    chosen = read_plan(plan_file)
    tell(chosen.frozen.reasons, as_json, lambda _: [*explain_lines(chosen), "", *origin_lines(chosen)])


def diff(
    first: Annotated[Path, typer.Argument(help="A plan.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another plan.", metavar="B")],
    price: Annotated[float | None, typer.Option(min=0, max=1e6, help="Price of an hour, to compare costs.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two plans: settings, memory, time and cost."""
    from autotune.reporting import difference_lines, differences
    from autotune.schema import read_plan

    found = differences(read_plan(first), read_plan(second), price_per_hour=price)
    tell(found, as_json, difference_lines)
