"""A readable summary.md beside the raw rows: `python benchmarks/gpu/summary.py FOLDER`. Every figure comes from them."""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GIB = 2**30


def rows_in(folder: Path) -> list[Row]:
    """All whole rows of all parts; a killed part may have left half of one."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                print(f"{path.name}: a row is broken", file=sys.stderr)
    return rows


def of(rows: Iterable[Row], part: str, kind: str) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["part"] == part and row["kind"] == kind]


def table(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table, or a line that says there is nothing."""
    body = [f"| {' | '.join(shown(cell) for cell in line)} |" for line in lines]
    return ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *body, ""] if body else ["nothing measured", ""]


def shown(value: Any) -> str:
    """Three or four digits of a number; text as it is."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def gib(value: float | None) -> float | None:
    """Bytes in GiB."""
    return None if value is None else value / GIB


def spread(values: Sequence[float]) -> str:
    """Median, smallest, largest, and how many."""
    if not values:
        return "-"
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g}, n {len(values)})"


def errors_line(name: str, errors: Sequence[float], target: str) -> tuple[Any, ...]:
    """Mean, 95th percentile and worst of relative errors in per cent; the last with its sign."""
    if not errors:
        return (name, 0, None, None, None, target)
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[min(len(sizes) - 1, round(0.95 * (len(sizes) - 1)))]
    worst = max(errors, key=abs)
    return (name, len(errors), 100 * statistics.mean(sizes), 100 * p95, f"{100 * worst:+.1f}", target)


def facts(rows: list[Row]) -> list[str]:
    tests = of(rows, "facts", "test")
    lines = [f"Tests on the GPU: {dict(Counter(test['outcome'] for test in tests))}", ""]
    lines += [f"- {test['outcome']}: {test['test']}" for test in tests if test["outcome"] != "passed"]
    lines += table(("rate", "value", "unit", "spread", "n"), ((r["name"], r["value"], r["unit"], r["spread"], r["num_samples"]) for r in of(rows, "facts", "rate")))  # noqa: E501
    lines += [f"native attention {'with' if r['masked'] else 'without'} a mask: {r['kernel']}  " for r in of(rows, "facts", "native attention")]  # noqa: E501
    lines += table(("model", "captions", "check", "trains", "why"), ((r["model"], r["padding"], r["name"], r["available"], r["reason"]) for r in of(rows, "facts", "gradients")))  # noqa: E501
    return lines


def accuracy(rows: list[Row]) -> list[str]:
    trials = of(rows, "accuracy", "trial")
    good = [row for row in trials if row["outcome"] == "ok"]
    lines = [f"{len(trials)} configurations: {dict(Counter(row['outcome'] for row in trials))}. "
             "Errors are (predicted - measured) / measured; after calibration, on those held out from it.", ""]  # fmt: skip

    def errors(which: str, told: str, measured: Any) -> list[float]:
        return [row[which][told] / measured(row) - 1 for row in good if row[which] and measured(row)]

    peak, held = (lambda row: row["peak_memory_bytes"]), (lambda row: row["reserved_bytes"])
    time = lambda row: statistics.median(row["step_seconds"])  # noqa: E731
    lines += table(("what", "n", "mean %", "p95 %", "worst %", "target"), (
        errors_line("memory allocated, before any trial", errors("predicted", "allocated_bytes", peak), "mean 5, p95 10"),
        errors_line("memory allocated, after one", errors("calibrated", "allocated_bytes", peak), "mean 2.5"),
        errors_line("memory reserved, before any trial", errors("predicted", "reserved_bytes", held), "-"),
        errors_line("step time, before any trial", errors("predicted", "step_seconds", time), "12"),
        errors_line("step time, after one", errors("calibrated", "step_seconds", time), "5"),
    ))  # fmt: skip
    lines += table(
        ("model", "px", "rank", "targets", "settings", "GiB", "predicted", "reserved", "s/step", "predicted", "spread %", "load s"),  # noqa: E501
        ((r["model"], r["side_px"], r["rank"], r["targets"], settings(r["candidate"]) + f" of {r['batch']}" + " masked" * (r["padding"] == "masked"),  # noqa: E501
          gib(r["peak_memory_bytes"]), gib(r["predicted"]["allocated_bytes"]), gib(r["reserved_bytes"]),
          statistics.median(r["step_seconds"]) if r["step_seconds"] else r["outcome"], r["predicted"]["step_seconds"],
          100 * (max(r["step_seconds"]) / min(r["step_seconds"]) - 1) if r["step_seconds"] else None, r["load_seconds"])
         for r in trials))  # fmt: skip
    return lines


def settings(candidate: Row) -> str:
    """A candidate in few words."""
    words = (candidate["quantization"], candidate["attention"].replace("_native_", ""))
    return f"batch {candidate['micro_batch_size']}, ckpt {candidate['checkpointed_blocks']}, {', '.join(words)}"


def training(rows: list[Row]) -> list[str]:
    work = (of(rows, "training", "work") or [{}])[-1]
    names = dict.fromkeys(row["name"] for row in of(rows, "training", "steps"))
    lines = []
    for name in names:
        found = [row for row in of(rows, "training", "steps") if row["name"] == name]
        seconds = [s / work["batch"] for row in found for s in row.get("step_seconds", ())]
        peaks = [row["peak_memory_bytes"] for row in found if row.get("peak_memory_bytes")]
        achieved = work["model_flops_per_image"] / statistics.median(seconds) if seconds else None
        share = achieved / work["matmul_flops_per_second"] if achieved and work["matmul_flops_per_second"] else None
        chosen = next((settings(row["candidate"]) for row in found if row.get("candidate")), "-")
        lines.append((name, chosen, spread(seconds), gib(max(peaks, default=None)), achieved and achieved / 1e12, share))
    return table(("what", "settings", "s per image", "GiB", "TFLOP/s", "of measured matmul"), lines)


def loading(rows: list[Row]) -> list[str]:
    lines = [f"- checkpoint of {r['bytes'] / 1e9:.1f} GB, {r['blocks']} of {r['full_blocks']} blocks: built in "
             f"{r['build_seconds']:.1f} s, saved in {r['save_seconds']:.1f} s" for r in of(rows, "loading", "checkpoint")]  # fmt: skip  # noqa: E501
    return lines + table(("from", "loader", "storage", "s", "GB/s", "device peak GiB", "host peak GiB"), (
        (r["source"], r["loader"] if "bytes" in r else "-", r["storage"], r.get("seconds", r.get("outcome")),
         r["bytes"] / 1e9 / r["seconds"] if "bytes" in r and "seconds" in r else None,
         gib(r.get("device_peak_bytes")), gib(r.get("host_peak_bytes"))) for r in of(rows, "loading", "load")))  # fmt: skip  # noqa: E501


def search(rows: list[Row]) -> list[str]:
    grid = [r for r in of(rows, "accuracy", "trial") if r["outcome"] == "ok" and r.get("grid")]
    lines = []
    for row in of(rows, "search", "plan"):
        cap = "whole card" if row["cap_gib"] is None else f"{row['cap_gib']} GiB"
        if row["status"]:
            lines.append((cap, f"status {row['status']}", None, None, row["message"][-160:], None, None))
            continue
        frozen = row["plan"]["frozen"]
        budget, seconds = frozen["hardware"]["budget_bytes"], frozen["expected"]["step_seconds"]
        fits = [statistics.median(r["step_seconds"]) for r in grid if (r["reserved_bytes"] or 0) <= budget]
        best = min(fits, default=None)
        lines.append((cap, sum(row["outcomes"].values()), dict(row["outcomes"]), row["seconds"] / 60,
                      settings(frozen["settings"]), seconds, best and f"{100 * (seconds / best - 1):+.1f}% (n {len(fits)})"))  # fmt: skip  # noqa: E501
    return table(("cap", "trials", "outcomes", "minutes", "chosen", "s/step", "against the best measured"), lines)


def run(rows: list[Row]) -> list[str]:
    lines = [f"- start: sent {r['sent']}, status {r['status']}, {r['recorded_steps']} steps recorded, "
             f"{r['seconds']:.0f} s" for r in of(rows, "run", "start")]  # fmt: skip
    for report in (row["report"] for row in of(rows, "run", "report")):
        lines += table(("", "promised", "measured"), (
            ("s/step", report["expected_step_seconds"], report["measured_step_seconds"]),
            ("peak GiB", gib(report["expected_peak_memory_bytes"]), gib(report["measured_peak_memory_bytes"]))))  # fmt: skip  # noqa: E501
    for row in of(rows, "run", "steps"):
        held = [value for value in row["memory_bytes"] if value]
        if held:
            lines.append(f"- memory between steps: first {gib(held[0]):.4g}, last {gib(held[-1]):.4g} GiB, n {len(held)}")
    return lines or ["nothing measured"]


def faults(rows: list[Row]) -> list[str]:
    found = [(r["what"], r["outcome"], r["message"][:160]) for r in of(rows, "faults", "trial")]
    found += [(f"search {r['number']} of two at once", f"status {r['status']}", f"{r['seconds']:.0f} s") for r in of(rows, "faults", "search")]  # noqa: E501
    return table(("fault", "outcome", "said"), found)


def limits(rows: list[Row]) -> list[str]:
    lines = []
    for row in of(rows, "limits", "kernels"):
        if "by_kind" not in row:
            lines.append((settings(row["candidate"]), row["outcome"], row["message"][:160], None, None))
            continue
        busy = sum(row["by_kind"].values())
        split = ", ".join(f"{kind} {seconds / busy:.0%}" for kind, seconds in
                          sorted(row["by_kind"].items(), key=lambda item: -item[1]))  # fmt: skip
        lines.append((settings(row["candidate"]), row["step_seconds"], split, busy / row["step_seconds"], row["launches"]))
    return table(("settings", "s/step", "kernels", "kernel time of step", "launches"), lines)


SECTIONS = (facts, accuracy, training, loading, search, run, faults, limits)


def main() -> None:
    folder = Path(sys.argv[1])
    rows = rows_in(folder)
    machines = [row for row in rows if row["kind"] == "machine"]
    if not machines:
        raise SystemExit(f"{folder} holds no rows")
    last = machines[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
    lines = [f"# {last['gpu'] or last['cpu']}, {last['date'][:10]}", ""]
    if any(row["small"] for row in rows):
        lines += ["**A rehearsal with tiny models: nothing here is evidence.**", ""]
    lines += [f"driver {last['driver']}, CUDA {last['cuda']}, cuDNN {last['cudnn']}, Python {last['python']}; {versions}. ",
              f"Host: {last['cpu']}, {last['cores']} cores, {last['host_memory_bytes'] / GIB:.0f} GiB. Commit {last['commit']}. ",  # noqa: E501
              "Median (smallest to largest, n) unless said otherwise.", ""]  # fmt: skip
    for section in SECTIONS:
        if any(row["part"] == section.__name__ for row in rows):
            lines += [f"## {section.__name__.capitalize()}", "", *section(rows), ""]
    left_out = [f"- {r['part']}: {r.get('what', r.get('model', ''))}: {r.get('why', r.get('message'))}" for r in rows if r["kind"] in ("skipped", "error")]  # noqa: E501
    lines += ["## Left out or failed", "", *(left_out or ["nothing"]), ""]
    (folder / "summary.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
