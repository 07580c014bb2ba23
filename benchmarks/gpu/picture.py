"""Seconds per image against peak memory as checkpointed blocks go from all to none: lines
predicted, dots measured.

`python benchmarks/gpu/picture.py FOLDER` writes picture.svg from the rows alone."""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from summary import GIB, LEVERS, of, rows_in

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 30, 50, 60
CAPS_GIB = (24, 32, 48, 80)
COLORS = ("#1b6ca8", "#c2410c", "#15803d", "#7e22ce")


Dot = tuple[int, float, float, dict[str, Any]]
"""Micro-batch, GiB, seconds per image and the candidate of a trial."""


@dataclass(frozen=True)
class Plot:
    """Where values lie on the picture, whose axes begin at zero."""

    max_x: float
    max_y: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return LEFT + x / self.max_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / self.max_y * (
            HEIGHT - TOP - BOTTOM
        )


def main() -> None:
    """Draw the picture of a folder of rows."""
    folder = Path(sys.argv[1])
    rows = rows_in(folder)
    curves = of(rows, "accuracy", "curve")
    if not curves:
        return
    curve = curves[0]
    same = ("model", "side_px", "rank", "targets", "padding", "batch")
    trials = [
        r
        for r in of(rows, "accuracy", "trial")
        if r["outcome"] == "ok" and all(r[k] == curve[k] for k in same)
    ]
    dots = [
        (
            r["candidate"]["micro_batch_size"],
            r["peak_memory_bytes"] / GIB,
            statistics.median(r["step_seconds"]) / curve["batch"],
            r["candidate"],
        )
        for r in trials
    ]
    lines: dict[int, list[tuple[float, float]]] = {}
    for batch, _, allocated, seconds in curve["points"]:
        lines.setdefault(batch, []).append((allocated / GIB, seconds))
    points = [(x, y) for _, x, y, _ in dots] + [point for line in lines.values() for point in line]
    plot = Plot(1.08 * max(x for x, _ in points), 1.15 * max(y for _, y in points))
    out = frame(plot, curve)
    for number, (batch, line) in enumerate(sorted(lines.items())):
        out += batch_marks(plot, number, batch, line, [dot for dot in dots if dot[0] == batch])
    hollow = "hollow: other weights, attention or code than the line's"
    out += [text(WIDTH - RIGHT, TOP + 18 * (len(lines) + 1), hollow, "end"), "</svg>"]
    (folder / "picture.svg").write_text("\n".join(out) + "\n")


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def frame(plot: Plot, curve: dict[str, Any]) -> list[str]:
    """Title, axes and the memory of common cards."""
    small = " (a rehearsal with tiny models)" if curve["small"] else ""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(
            WIDTH / 2,
            24,
            f"{curve['model']}, {curve['side_px']} px, rank {curve['rank']}: "
            f"all blocks checkpointed (left) to none (right){small}",
        ),
        text(WIDTH / 2, HEIGHT - 14, "peak memory of a training step, GiB allocated"),
        '<g transform="rotate(-90 18 '
        f'{HEIGHT / 2})">{text(18, HEIGHT / 2, "seconds per image")}</g>',
    ]
    for share in (step / 5 for step in range(6)):
        x, y = plot.at(plot.max_x * share, 0)
        out.append(text(x, y + 18, f"{plot.max_x * share:.3g}"))
        out.append(
            text(
                LEFT - 8, plot.at(0, plot.max_y * share)[1] + 4, f"{plot.max_y * share:.3g}", "end"
            )
        )
    out.append(
        f'<path d="M{LEFT} {TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" fill="none" stroke="#333"/>'
    )
    for cap in (cap for cap in CAPS_GIB if cap < plot.max_x):
        x = plot.at(cap, 0)[0]
        out.append(
            f'<path d="M{x:.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="#bbb" stroke-dasharray="4 4"/>'
        )
        out.append(text(x, TOP - 6, f"{cap} GiB", color="#777"))
    return out


def batch_marks(
    plot: Plot, number: int, batch: int, line: list[tuple[float, float]], dots: list[Dot]
) -> list[str]:
    """The line and the dots of one micro-batch, and what they are."""
    color = COLORS[number % len(COLORS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (plot.at(*point) for point in line))
    label = f"micro-batch {batch}: line predicted, dots measured"
    out = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
           text(WIDTH - RIGHT, TOP + 18 * (number + 1), label, "end", color)]  # fmt: skip
    for _, x, y, chosen in dots:
        plain = (chosen["quantization"], chosen["attention"]) == ("none", "native")
        plain = plain and all(chosen[name] == usual for name, usual in LEVERS)
        px, py = plot.at(x, y)
        fill = color if plain else "white"
        out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{fill}" '
                   f'stroke="{color}"><title>'
                   f'{chosen["quantization"]}, {chosen["attention"]}, '
                   f'{chosen["checkpointed_blocks"]} blocks'
                   "</title></circle>")  # fmt: skip
    return out


if __name__ == "__main__":
    main()
