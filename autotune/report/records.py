"""Shared records as text in 80 columns. Pure."""

from collections.abc import Sequence
from typing import Any

from autotune.report.text import cut, memory_text, seconds_text, wrapped

VERDICTS = {"exact": "counts here", "near": "a prior here", "none": "does not count here"}


def record_list_lines(rows: Sequence[Any]) -> list[str]:
    """Two lines for each record, and whether it counts on this machine if that was asked."""
    lines = []
    for row in rows:
        numbers = (
            f"{seconds_text(row.step_seconds)}, {memory_text(row.peak_memory_bytes)} in a step"
        )
        lines.append(cut(f"{row.name[:12]}  {row.measured_on}  {row.device_name}"))
        lines.append(cut(f"    {row.family}  {row.work}  {row.num_trials} trials"))
        lines.append(cut(f"    {row.settings}: {numbers}"))
        if row.match:
            told = f": {'; '.join(row.reasons)}" if row.reasons else ""
            lines += wrapped(f"    {VERDICTS[row.match]}{told}", 4)
    return lines or ["no records yet: `autotune plan` makes them, `profiles pull URL` fetches them"]
