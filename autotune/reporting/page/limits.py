"""What limits a run: its step time beside what the same work takes at the rates that the probe
measured.
"""

from autotune.schema import TrainingPlan

KINDS = {
    "compute": ("matmul_seconds", "adapter_seconds", "attention_seconds", "convolution_seconds"),
    "memory bandwidth": ("elementwise_seconds", "dequantization_seconds", "optimizer_seconds"),
    "transfer": ("transfer_seconds",),
    "launching operations": ("overhead_seconds",),
}
"""Kinds of work by what they wait for."""


def limit_text(plan: TrainingPlan, step_seconds: float, data_seconds: float) -> str:
    """One line: what most of a step waits for, and how much of the probed rates the run reached.

    Args:
        plan: the run's; without a forecast only waiting for data can be told.
        step_seconds: measured wall time of a step.
        data_seconds: the part of it that was spent waiting for data.
    """
    if plan.frozen.forecast is None:
        waits = (
            f"{min(1.0, data_seconds / step_seconds):.0%} of a step waits for data"
            if step_seconds
            else "unknown"
        )
        return f"{waits}; the plan is of an older autotune and does not tell the rest"
    time = plan.frozen.forecast.step_time
    seconds = {kind: sum(getattr(time, name) for name in names) for kind, names in KINDS.items()}
    seconds["data"] = data_seconds
    kind = max(seconds, key=lambda name: seconds[name])
    return (
        f"{kind}, {sum(seconds.values()) / step_seconds:.0%} of what this device reached in "
        "the "
        "probe"
    )
