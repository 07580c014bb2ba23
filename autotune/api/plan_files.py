"""Reading and writing plan files, which needs neither torch nor a machine."""

from pathlib import Path

from autotune.plan.file import read_plan, write_plan
from autotune.plan.plan import TrainingPlan


def load_plan(path: str | Path) -> TrainingPlan:
    """Read and validate a plan file. Says nothing about whether it fits this machine: `check` does.

    Raises:
        InvalidPlan: the file is not a plan, comes from a newer autotune, or was edited where it is
            frozen.

    Example:
        >>> plan = autotune.load_plan("plan.yaml")
        >>> plan.job.num_steps, plan.frozen.settings
    """
    return read_plan(Path(path))


def save_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Example:
        >>> autotune.save_plan(autotune.load_plan("plan.yaml"), "copy.yaml")
    """
    write_plan(Path(path), plan)
