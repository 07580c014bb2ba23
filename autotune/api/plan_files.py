"""Reading and writing plan files, which needs neither torch nor, for a file with a single plan,
a machine.
"""

from pathlib import Path

from autotune.schema import HardwareProfile, TrainingPlan, load_variants, write_plan


def load_plan(path: str | Path, *, hardware: str | HardwareProfile | None = None) -> TrainingPlan:
    """Read and validate a plan file. Says nothing about whether its only plan fits this machine:
    `check` does.

    Args:
        path: the file.
        hardware: of a file with variants, which machine's to take: as for `plan`; None for this
            machine's.

    Raises:
        InvalidPlan: the file is not a plan, comes from a newer autotune, or was edited where it is
            frozen.
        DoesNotFit: none of several variants is for the machine.

    Example:
        >>> plan = autotune.load_plan("plan.yaml")
        >>> plan.job.num_steps, plan.frozen.settings
    """
    plans = load_variants(path)
    if len(plans) == 1:
        return plans[0]
    from autotune.api.machines import (
        hardware_for,
    )  # reading a single plan takes none of what a machine does
    from autotune.hardware import probe as read_machine
    from autotune.training import choose_variant

    return choose_variant(plans, read_machine() if hardware is None else hardware_for(hardware))


def save_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Example:
        >>> autotune.save_plan(autotune.load_plan("plan.yaml"), "copy.yaml")
    """
    write_plan(Path(path), plan)
