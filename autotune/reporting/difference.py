"""Two plans side by side: what differs in work, settings, memory, time and cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.reporting.text import memory_text, seconds_text, uncertainty_text
from autotune.schema import TrainingPlan

QUANTITIES = ("_bytes", "_seconds", "images_per_second", "num_steps", "cost")
"""How names end whose values are compared by their ratio; others, such as a rank, are chosen,
not measured.
"""
TIMES = ("step_seconds", "run_seconds")
"""Names of values that a plan may have predicted, as uncertain as it says."""


@dataclass(frozen=True)
class Difference:
    """One thing that both plans have and that is not the same; for quantities the second over
    the first, too.
    """

    name: str
    first: str | int | float | None
    second: str | int | float | None
    ratio: float | None = None
    first_uncertainty: float | None = None
    """Standard error of `first`, as a share of it, if it is a time that was predicted."""
    second_uncertainty: float | None = None


def differences(
    first: TrainingPlan, second: TrainingPlan, *, price_per_hour: float | None = None
) -> tuple[Difference, ...]:
    """What differs, in the order of a plan's report. Units are in the names."""
    ours, theirs = list(_facts(first, price_per_hour)), list(_facts(second, price_per_hour))
    doubts = [plan.frozen.expected.time_uncertainty for plan in (first, second)]
    return tuple(
        Difference(
            *(name, a, b),
            b / a if name.endswith(QUANTITIES) and a and b is not None else None,  # type: ignore[operator]
            *(doubts if name in TIMES else ()),
        )
        for (name, a), (_, b) in zip(ours, theirs, strict=True)
        if a != b
    )


def _facts(
    plan: TrainingPlan, price_per_hour: float | None
) -> Iterator[tuple[str, str | int | float | None]]:
    frozen, expected = plan.frozen, plan.frozen.expected
    yield "model", frozen.workload.model.name
    yield "device", frozen.hardware.device_name
    for name in type(frozen.workload).model_fields:
        if name not in ("model", "buckets"):
            yield f"workload.{name}", getattr(frozen.workload, name)
    largest = frozen.workload.largest_bucket
    yield "workload.largest_bucket", f"{largest.width_px}x{largest.height_px}x{largest.num_frames}"
    for name, value in frozen.settings:
        yield f"settings.{name}", value
    yield "evidence", expected.evidence
    yield "run_memory_bytes", expected.run_memory_bytes
    yield "step_memory_bytes", expected.peak_memory_bytes
    yield "step_seconds", expected.step_seconds
    yield "images_per_second", expected.images_per_second
    yield "num_steps", plan.job.num_steps
    yield "run_seconds", plan.job_seconds
    if price_per_hour is not None:
        yield "cost", plan.cost_at(price_per_hour)
    yield "search_seconds", frozen.search_seconds


def difference_lines(found: Sequence[Difference]) -> list[str]:
    """Aligned for people."""
    if not found:
        return ["the plans do not differ"]
    return [
        f"{_title(item.name):<24} "
        f"{_shown(item.name, item.first) + uncertainty_text(item.first_uncertainty):>20} -> "
        f"{_shown(item.name, item.second) + uncertainty_text(item.second_uncertainty):<20}"
        f"{'' if item.ratio is None else _times(item.ratio)}".rstrip()
        for item in found
    ]


def _times(ratio: float) -> str:
    return f" {ratio:.2f}x" if ratio >= 0.1 else f" {ratio:.2g}x"


def _title(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _shown(name: str, value: str | int | float | None) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return memory_text(value)
    if name.endswith("_seconds") and isinstance(value, float):
        return seconds_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
