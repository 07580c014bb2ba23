"""Writes what was promised against what was measured, of the newest committed results: the tables
of docs/evidence.md, by model and card, and its two pictures: python docs/site/evidence.py"""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
# Colors that can be told apart without red and green, on white and on black.
KINDS = {
    "measured on a CPU": "#8a8f98",
    "measured on a GPU": "#0a9a83",
    "published by others": "#d9822b",
}
CPU, GPU, OTHERS = KINDS
SIDE, LEFT, TOP = 430, 62, 18
UNITS = {"memory": "GiB", "time": "s"}

MEASURED = re.compile(r"^(\S+) .* ([\d.]+) +([+-][\d.]+)% +\S+ +([\d.]+) +([+-][\d.]+)%$", re.M)
PUBLISHED = re.compile(r"^ *\w+ (\S+) +(\S+) +(.*?) {2,}.* (?:full|none) .*predicted.*%$", re.M)
FIGURES = re.compile(r"(memory|step) +~?([\d.]+) predicted +([\d.]+)")


@dataclass(frozen=True)
class Reading:
    """A size in GiB or a time in seconds that was promised and measured."""

    what: str
    kind: str
    model: str
    card: str
    program: str
    command: str
    measured: float
    promised: float

    @property
    def error(self) -> float:
        return self.promised / self.measured - 1


def readings() -> Iterator[Reading]:
    """Yield all readings of the newest results."""
    newest = {
        name: max(RESULTS.glob(name))
        for name in (
            "cost-memory-*.json",
            "cost_accuracy_*.json",
            "allocator-truth-2*-??.jsonl",
            "published-2*.txt",
        )
    }
    memory, time, stand_in, published = newest.values()
    cpu = "CPU", "autotune", "cost_accuracy.py"
    for row in json.loads(memory.read_text())["rows"]:
        sizes = row["peak_bytes"] / GIB, row["predicted_peak_bytes"] / GIB
        yield Reading("memory", CPU, row["family"], *cpu, *sizes)
    for row in json.loads(time.read_text())["rows"]:
        if not row["calibrated_on"]:
            seconds = row["step_seconds"], row["predicted_step_seconds"]
            yield Reading("time", CPU, row["family"], *cpu, *seconds)
    for row in map(json.loads, stand_in.read_text().splitlines()):
        if "allocated_bytes" not in row:  # it ran out, as predicted
            continue
        sizes = row["allocated_bytes"] / GIB, row["predicted_bytes"] / GIB
        card = "4090, 5090, h100", "its stand-in", "allocator_truth.py"
        yield Reading("memory", "", row["model"], *card, *sizes)
    for folder in sorted(RESULTS.glob("gpu/*")):  # DATE-CARD
        card = folder.name.rpartition("-")[2], "autotune", "gpu/compare.py"
        for model, *texts in MEASURED.findall(min(folder.glob("compare*.txt")).read_text()):
            seconds, time_error, gib, memory_error = map(float, texts)
            times = seconds, seconds * (1 + time_error / 100)
            yield Reading("time", GPU, model, *card, *times)
            sizes = gib, gib * (1 + memory_error / 100)
            yield Reading("memory", GPU, model, *card, *sizes)
    for found in PUBLISHED.finditer(published.read_text()):
        card = found[2].removeprefix("rtx-").removesuffix("-sxm"), found[3], "published.py"
        for what, measured, promised in FIGURES.findall(found[0]):
            name = "memory" if what == "memory" else "time"
            yield Reading(name, OTHERS, found[1], *card, float(measured), float(promised))


def table(what: str, found: list[Reading]) -> list[str]:
    """Return a table by model and card, the worst misses first."""
    groups = defaultdict(list)
    for one in found:
        groups[one.model, one.card, one.program, one.command].append(one.error)
    lines = [
        "| model | card | program | median (n) | worst | command |",
        "|---|---|---|---|---|---|",
    ]
    for key, errors in sorted(groups.items(), key=lambda item: -max(map(abs, item[1]))):
        *of, command = key
        median, worst = statistics.median(errors), max(errors, key=abs)
        told = f"{median:+.1%} ({len(errors)}) | {worst:+.1%}"
        lines.append(f"| {' | '.join(of)} | {told} | {command} |")
    return lines


def records() -> list[str]:
    """Return a table of the records that people have sent."""
    lines = [
        "| card | model | pixels | batch | a step | memory | day |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in sorted((ROOT / "profiles" / "records").rglob("*.json")):
        each = json.loads(file.read_text())
        work, promised = each["workload"], each["expected"]
        lines.append(
            f"| {each['machine']['device_name']} | {work['model']['name']} | "
            f"{work['resolution_px']} | {work['effective_batch_size']} | "
            f"{promised['step_seconds']:.3f} s | {promised['peak_memory_bytes'] / GIB:.1f} GiB | "
            f"{each['measured_on']} |"
        )
    return lines


def markdown() -> str:
    """Return the page with the tables of today's results."""
    found = list(readings())
    text = PAGE.read_text()
    tables = {what: table(what, [one for one in found if one.what == what]) for what in UNITS}
    for name, lines in {**tables, "records": records()}.items():
        begin, end = f"<!-- {name}: written by docs/site/evidence.py -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{end}{rest.partition(end)[2]}"
    return text


def draw(title: str, unit: str, drawn: list[Reading]) -> str:
    """Return a chart with equal logarithmic axes, and the line where a promise is kept."""
    values = [value for one in drawn for value in (one.measured, one.promised)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def at(value: float) -> float:
        return SIDE * (math.log10(value) - low) / (high - low)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + 90} {SIDE + 150}"'
        f' width="440" font-family="sans-serif" font-size="12" fill="#7a808a" role="img">',
        f"<title>{title}</title>",
    ]
    for power in range(low, high + 1):
        x, y, label = LEFT + at(10**power), TOP + SIDE - at(10**power), f"{10.0**power:g}"
        lines += [
            f'<path d="M{x:.1f} {TOP}v{SIDE}M{LEFT} {y:.1f}h{SIDE}" stroke="#7a808a"'
            ' opacity=".3"/>',
            f'<text x="{x:.1f}" y="{TOP + SIDE + 18}" text-anchor="middle">{label}</text>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    lines.append(
        f'<path d="M{LEFT} {TOP + SIDE}l{SIDE} {-SIDE}" stroke="#7a808a" stroke-dasharray="5 4"/>'
    )
    for row, (kind, color) in enumerate(KINDS.items()):
        spots = "".join(
            f'<circle cx="{LEFT + at(one.measured):.1f}" cy="{TOP + SIDE - at(one.promised):.1f}"'
            ' r="3.2"/>'
            for one in drawn
            if one.kind == kind
        )
        y, count = TOP + SIDE + 62 + 20 * row, sum(one.kind == kind for one in drawn)
        lines += [
            f'<g fill="{color}" fill-opacity=".65">{spots}'
            f'<circle cx="{LEFT}" cy="{y - 4}" r="4"/></g>',
            f'<text x="{LEFT + 12}" y="{y}">{kind}: {count}</text>',
        ]
    middle = TOP + SIDE / 2
    lines += [
        f'<text x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 38}" text-anchor="middle">'
        f"measured, {unit}</text>",
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"promised, {unit}</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown())
    found = list(readings())
    for what, title in (
        ("memory", "Memory of a step, promised against measured"),
        ("time", "Seconds of a step, promised against measured"),
    ):
        drawn = [one for one in found if one.what == what and one.kind]
        (ROOT / "docs" / f"promised-{what}.svg").write_text(draw(title, UNITS[what], drawn))
