"""A readable summary.md beside the raw rows, made of nothing but them: `python
benchmarks/gpu/summary.py FOLDER`."""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GIB = 2**30
LEVERS = (("norm_rope", "stock"), ("modulation", "resident"), ("compile", "off"))
"""Knobs of a candidate that are told where they are not diffusers' own way."""
TABLES = {
    "facts": {
        "rate": "name value unit spread num_samples",
        "native attention": "masked kernel",
        "gradients": "model padding name available reason",
        "test": "outcome test",
    },
    "truth": {
        "trial": "model size_px num_frames batch padding setting outcome step_seconds "
        "peak_memory_bytes reserved_bytes profile.kernel_seconds profile.launches "
        "launch_seconds load_seconds message"
    },
    "training": {"steps": "name turn candidate outcome step_seconds peak_memory_bytes message"},
    "loading": {
        "checkpoint": "blocks full_blocks bytes build_seconds save_seconds",
        "load": (
            "cache loader storage bytes outcome seconds device_peak_bytes host_peak_bytes message"
        ),
    },
    "search": {
        "plan": "cap_gib status seconds outcomes plan.frozen.settings "
        "plan.frozen.expected.step_seconds "
        "plan.frozen.expected.peak_memory_bytes message"
    },
    "run": {
        "start": "resumed sent status seconds recorded_steps",
        "steps": "seconds memory_bytes losses",
        "report": "report.expected_step_seconds report.measured_step_seconds "
        "report.expected_peak_memory_bytes "
        "report.measured_peak_memory_bytes report.total_seconds report.data_seconds "
        "report.warnings",
        "phase": (
            "name seconds expected.seconds device_bytes expected.device_bytes host_bytes "
            "expected.host_bytes"
        ),
    },
}
"""What is shown of the rows of each part and kind; dots lead into objects."""


def rows_in(folder: Path) -> list[Row]:
    """All whole rows of all parts; a killed part may have left half of one."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                sys.stderr.write(f"{path.name}: a row is broken\n")
    return rows


def of(rows: Iterable[Row], part: str, kind: str) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["part"] == part and row["kind"] == kind]


def value_at(row: Any, path: str) -> Any:
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def shown(value: Any, path: str = "") -> str:
    """Bytes in GiB, series as median (smallest to largest, n), settings in few words, numbers in
    four digits."""
    if path.endswith("bytes"):
        values = value if isinstance(value, list) else [value]
        value = [number / GIB for number in values if number is not None]
        value = value if len(value) > 1 else next(iter(value), None)
    if value is None:
        return "-"
    if (
        isinstance(value, list)
        and value
        and all(isinstance(number, int | float) for number in value)
    ):
        return (
            f"{statistics.median(value):.4g} ({min(value):.4g} to {max(value):.4g}, n {len(value)})"
        )
    if isinstance(value, dict) and "micro_batch_size" in value:
        words = [
            f"batch {value['micro_batch_size']}, ckpt {value['checkpointed_blocks']}",
            value["quantization"],
        ]
        words += [
            value["attention"],
            *(f"{name} {value[name]}" for name, usual in LEVERS if value[name] != usual),
        ]
        return ", ".join(words)
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[-200:]


def table(rows: Sequence[Row], paths: str) -> list[str]:
    """A Markdown table of these rows, without columns that nothing fills."""
    filled = [
        path
        for path in paths.split()
        if any(value_at(row, path) not in (None, "", []) for row in rows)
    ]
    heads = [path.replace("_bytes", " GiB").replace("_", " ").replace(".", " ") for path in filled]
    lines = [
        f"| {' | '.join(shown(value_at(row, path), path) for path in filled)} |" for row in rows
    ]
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines, ""] if rows else []


def main() -> None:
    """Write the summary of a folder of rows."""
    folder = Path(sys.argv[1])
    rows = rows_in(folder)
    machine = next(row for row in reversed(rows) if row["kind"] == "machine")
    device, host, versions = machine["device"], machine["host"], machine["versions"]
    lines = [f"# {device['name']}, {machine['date'][:10]}", ""]
    if any(row["small"] for row in rows):
        lines += ["**A rehearsal with tiny models: nothing here is evidence.**", ""]
    memory, host_memory = (
        shown(of_what, "bytes") for of_what in (device["total_memory_bytes"], host["memory_bytes"])
    )
    lines += [
        f"{memory} GiB; host: {host['cpu']}, {host['logical_cores']} cores, {host_memory} GiB, "
        f"{host['system']}. "
        "Versions: "
        f"{', '.join(f'{name} {version}' for name, version in versions.items() if version)}. "
        f"Commit {machine['commit']}. Series: median (smallest to largest, n). Errors in percent.",
        "",
    ]
    for part, kinds in TABLES.items():
        if any(row["part"] == part for row in rows):
            lines += [f"## {part.capitalize()}", ""]
            for kind, paths in kinds.items():
                lines += table(of(rows, part, kind), paths)
    left_out = [row for row in rows if row["kind"] in ("skipped", "error")]
    lines += ["## Left out or failed", "", *table(left_out, "part what model why message"), ""]
    (folder / "summary.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
