"""`check`: whether a plan fits a machine. What is wrong with its file is told before any library
is loaded."""

from pathlib import Path

from autotune.api.machines import hardware_for
from autotune.api.plan_files import load_plan
from autotune.machine.probe import probe
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import CheckResult, TrainingPlan


def check(
    plan: TrainingPlan | str | Path, *, hardware: str | HardwareProfile | None = None
) -> CheckResult:
    """Tell whether a plan fits this machine or another, without training.

    Args:
        plan: a plan, or its file.
        hardware: another machine: a catalog name, a saved probe's file or a
            profile.

    Raises:
        InvalidPlan: the file is not a valid plan.
        InvalidInput: there is no such hardware.

    Example:
        >>> autotune.check("plan.yaml").misfits
        >>> autotune.check("plan.yaml", hardware="4090").misfits
    """
    from autotune.train.prepare import card_misfits, hardware_misfits

    chosen = plan if isinstance(plan, TrainingPlan) else load_plan(plan)
    if hardware is not None:
        misfits = hardware_misfits(chosen, hardware_for(hardware))
    else:
        machine = probe()
        misfits = hardware_misfits(chosen, machine) + card_misfits(chosen, machine)
    return CheckResult(fits=not misfits, misfits=misfits)
