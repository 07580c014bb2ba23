"""Seconds per image against peak memory as checkpointed blocks go from all to none: lines predicted, dots measured.

`python benchmarks/gpu/picture.py FOLDER` writes picture.svg from the rows alone."""

import statistics
import sys
from pathlib import Path

from summary import GIB, of, rows_in

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 30, 50, 60
CAPS_GIB = (24, 32, 48, 80)
COLORS = ("#1b6ca8", "#c2410c", "#15803d", "#7e22ce")


def main() -> None:
    """Draw the picture of a folder of rows."""
    folder = Path(sys.argv[1])
    rows = rows_in(folder)
    curves = of(rows, "accuracy", "curve")
    if not curves:
        return
    curve = curves[0]
    same = ("model", "side_px", "rank", "targets", "padding", "batch")
    trials = [r for r in of(rows, "accuracy", "trial") if r["outcome"] == "ok" and all(r[k] == curve[k] for k in same)]
    dots = [(r["candidate"]["micro_batch_size"], r["peak_memory_bytes"] / GIB,
             statistics.median(r["step_seconds"]) / curve["batch"], r["candidate"]) for r in trials]  # fmt: skip
    lines: dict[int, list[tuple[float, float]]] = {}
    for batch, _, allocated, seconds in curve["points"]:
        lines.setdefault(batch, []).append((allocated / GIB, seconds))
    points = [(x, y) for _, x, y, _ in dots] + [point for line in lines.values() for point in line]
    most_x, most_y = 1.08 * max(x for x, _ in points), 1.15 * max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, anchor: str = "middle", color: str = "#333") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'

    small = " (a rehearsal with tiny models)" if curve["small"] else ""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           text(WIDTH / 2, 24, f"{curve['model']}, {curve['side_px']} px, rank {curve['rank']}: "
                               f"all blocks checkpointed (left) to none (right){small}"),
           text(WIDTH / 2, HEIGHT - 14, "peak memory of a training step, GiB allocated"),
           f'<g transform="rotate(-90 18 {HEIGHT / 2})">{text(18, HEIGHT / 2, "seconds per image")}</g>']  # fmt: skip
    for step in range(6):
        x, y = at(most_x * step / 5, 0)
        out += [
            text(x, y + 18, f"{most_x * step / 5:.3g}"),
            text(LEFT - 8, at(0, most_y * step / 5)[1] + 4, f"{most_y * step / 5:.3g}", "end"),
        ]
    out.append(f'<path d="M{LEFT} {TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" fill="none" stroke="#333"/>')
    for cap in (cap for cap in CAPS_GIB if cap < most_x):
        x = at(cap, 0)[0]
        out.append(f'<path d="M{x:.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="#bbb" stroke-dasharray="4 4"/>')
        out.append(text(x, TOP - 6, f"{cap} GiB", color="#777"))
    for number, (batch, line) in enumerate(sorted(lines.items())):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(
            text(
                WIDTH - RIGHT,
                TOP + 18 * (number + 1),
                f"micro-batch {batch}: line predicted, dots measured",
                "end",
                color,
            )
        )
        for size, x, y, chosen in dots:
            if size == batch:
                plain = chosen["quantization"] == "none" and chosen["attention"] == "native"
                px, py = at(x, y)
                fill = color if plain else "white"
                out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{fill}" stroke="{color}"><title>'
                           f'{chosen["quantization"]}, {chosen["attention"]}, {chosen["checkpointed_blocks"]} blocks'
                           "</title></circle>")  # fmt: skip
    out += [
        text(WIDTH - RIGHT, TOP + 18 * (len(lines) + 1), "hollow: other storage or attention than the line's", "end"),
        "</svg>",
    ]
    (folder / "picture.svg").write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
