"""Draws promised against measured memory and time, of the newest committed results.

python docs/site/scatter.py        # writes docs/promised-memory.svg and docs/promised-time.svg
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
# Colors that can be told apart without red and green, on white and on black.
KINDS = {
    "measured on a CPU": "#8a8f98",
    "measured on an H200": "#0a9a83",
    "published by others": "#d9822b",
}
SIDE, LEFT, TOP = 430, 62, 18
Point = tuple[str, float, float]

PUBLISHED = re.compile(r"(memory|step) +([\d.]+) predicted +([\d.]+)")
MEASURED = re.compile(r" ([\d.]+) +([+-][\d.]+)% +\S+ +([\d.]+) +([+-][\d.]+)%$", re.MULTILINE)


def points() -> Iterator[tuple[str, Point]]:
    """Yield `memory` in GiB and `time` in seconds: what is meant, measured and promised."""
    cpu, gpu, others = KINDS
    for row in json.loads(max(RESULTS.glob("cost_accuracy_*.json")).read_text())["rows"]:
        yield "memory", (cpu, row["peak_bytes"] / GIB, row["predicted_peak_bytes"] / GIB)
        if not row["calibrated_on"]:
            yield "time", (cpu, row["step_seconds"], row["predicted_step_seconds"])
    for file in sorted(RESULTS.glob("gpu/*/compare-after-correction.txt")):
        for found in MEASURED.findall(file.read_text()):
            seconds, time_error, gib, memory_error = map(float, found)
            yield "time", (gpu, seconds, seconds * (1 + time_error / 100))
            yield "memory", (gpu, gib, gib * (1 + memory_error / 100))
    for kind, measured, promised in PUBLISHED.findall(
        max(RESULTS.glob("published-2*.txt")).read_text()
    ):
        name = "memory" if kind == "memory" else "time"
        yield name, (others, float(measured), float(promised))


def draw(title: str, unit: str, drawn: list[Point]) -> str:
    """Return a chart with equal logarithmic axes, and the line where a promise is kept."""
    values = [value for _, *pair in drawn for value in pair]
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
            f'<circle cx="{LEFT + at(measured):.1f}" cy="{TOP + SIDE - at(promised):.1f}" r="3.2"/>'
            for name, measured, promised in drawn
            if name == kind
        )
        y, count = TOP + SIDE + 62 + 20 * row, sum(name == kind for name, *_ in drawn)
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
    found = list(points())
    for name, title, unit in (
        ("memory", "Memory of a step, promised against measured", "GiB"),
        ("time", "Seconds of a step, promised against measured", "s"),
    ):
        drawn = [point for kind, point in found if kind == name]
        (ROOT / "docs" / f"promised-{name}.svg").write_text(draw(title, unit, drawn))
