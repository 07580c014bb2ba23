"""Shared records as text in 80 columns. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.reporting.text import cut, memory_text, seconds_text, wrapped
from autotune.sharing import RecordSummary

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
