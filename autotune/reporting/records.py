"""Shared records as text in 80 columns: lists, one record, the difference of two. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.reporting.text import count_text, cut, memory_text, seconds_text, wrapped
from autotune.schema import TrialResult
from autotune.sharing import Record, RecordSummary, workload_class

VERDICTS = {
    "exact": "counts here",
    "upgraded": "counts here once verified",
    "near": "a prior here",
    "none": "does not count here",
    "impossible": "cannot be true",
}


def record_list_lines(
    rows: Sequence[RecordSummary], verdicts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Two lines for each record, and whether it counts on this machine if that was asked."""
    if not rows:
        return ["no records yet: `autotune plan` makes them, `profiles pull URL` fetches them"]
    lines = []
    for row in rows:
        numbers = (
            f"{seconds_text(row.step_seconds)}, {memory_text(row.peak_memory_bytes)} in a step"
        )
        lines.append(cut(f"{row.name[:12]}  {row.measured_on}  {row.device_name}"))
        lines.append(cut(f"    {row.family}  {row.work}  {row.num_trials} trials"))
        lines.append(cut(f"    {row.settings}: {numbers}"))
        if verdict := verdicts.get(row.name):
            told = f": {'; '.join(verdict['reasons'])}" if verdict["reasons"] else ""
            lines += wrapped(f"    {VERDICTS[verdict['match']]}{told}", 4)
    return lines


def record_lines(name: str, record: Record) -> list[str]:
    """One record: machine, work, what won, every trial."""
    machine, work, expected = record.machine, record.workload, record.expected
    versions = ", ".join(f"{key} {value}" for key, value in machine.versions if value)
    facts = (
        ("record", name),
        ("measured", f"{record.measured_on} by autotune {record.autotune_version}"),
        ("machine", f"{machine.device_name}, {memory_text(machine.total_memory_bytes)}"),
        (
            "match keys",
            ", ".join(f"{key} {value or 'none'}" for key, value in machine.match_keys.items()),
        ),
        ("versions", versions),
        ("model", f"{work.model.name}, {count_text(work.model.num_parameters)} parameters"),
        ("work", workload_class(work)),
        ("settings", record.settings.label()),
        (
            "promise",
            f"{seconds_text(expected.step_seconds)} a step, "
            f"{memory_text(expected.peak_memory_bytes)} in it",
        ),
        ("search", f"{len(record.trials)} trials in {seconds_text(record.search_seconds)}"),
    )
    lines = [line for title, text in facts for line in wrapped(f"{title:<11}{text}", 11)]
    return [*lines, "", *(_trial_line(trial) for trial in record.trials)]


def record_difference_lines(first: Record, second: Record) -> list[str]:
    """Every value in which two records differ; trials only in their number."""
    left, right = (dict(_flat(_comparable(record))) for record in (first, second))
    lines = []
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            lines += wrapped(f"{key}: {left.get(key, '-')} -> {right.get(key, '-')}", 4)
    return lines or ["the two say the same"]


def _comparable(record: Record) -> dict[str, Any]:
    data = record.model_dump(
        mode="json", exclude={"trials": True, "calibration": True, "machine": {"rates": True}}
    )
    rates = {rate.name: f"{rate.value:.4g} {rate.unit}" for rate in record.machine.rates}
    return data | {"num_trials": len(record.trials), "rates": rates}


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, dict | list):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _trial_line(trial: TrialResult) -> str:
    numbers = (
        f"{seconds_text(trial.median_step_seconds):>8} {memory_text(trial.peak_memory_bytes):>9}"
    )
    return cut(f"{trial.outcome:<11} {numbers}  {trial.candidate.label()}")
