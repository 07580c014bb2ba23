"""Charts as figures of plotly, in plain dictionaries: the page's script draws them.

A color is the name of one of the style sheet's, such as `--blue`: its value differs between light
and dark.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autotune.report.text import printable_lines

WIDE_RATIO = 8.0
"""Largest over smallest value from which an axis is logarithmic."""
SHOWN_BUDGET = 2.0
"""How many times what is shown a budget may be and still be on the chart's scale."""
MAX_POINTS = 300  # of a line: as many as a screen shows
Part = dict[str, Any]  # an axis, a trace, a shape or a figure
Reading = tuple[float, float, str]  # a point, and what is read of it
Rule = tuple[str, float, str]  # `x` or `y`, where a line across stands, and its label
SYMBOLS = {
    "predicted": ("circle-open", 10, "--blue"),
    "measured": ("circle", 11, "--blue"),
    "beyond": ("x-thin-open", 8, "--gray"),
    "failed": ("square-x-open", 12, "--gray"),
    "chosen": ("diamond-open", 20, "--orange"),
}
"""What marks look like: they differ without color, too."""
STYLES: dict[str, Part] = {
    "smooth": {"color": "--blue", "width": 2},
    "raw": {"color": "--raw", "width": 1},
    "front": {"color": "--gray", "width": 1.2, "dash": "dot", "shape": "hv"},
}

_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "--text"}
_LAYOUT = {
    "font": _FONT,
    "paper_bgcolor": "--back",
    "plot_bgcolor": "--back",
    "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--text", "font": _FONT, "align": "left"},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
    "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
    "uirevision": True,
}


def axis(
    label: str, values: Iterable[float] = (), *, suffix: str = "", from_zero: bool = False
) -> Part:
    """Return an axis for these values: logarithmic if they are far apart."""
    known = list(values)
    is_log = not from_zero and 0 < WIDE_RATIO * min(known, default=0) < max(known, default=0)
    return {
        "gridcolor": "--line",
        "linecolor": "--gray",
        "showline": True,
        "zeroline": False,
        "tickformat": ".6~g",
        "title": {"text": label, "standoff": 8},
        "ticksuffix": suffix,
        "type": "log" if is_log else "linear",
        "rangemode": "tozero" if from_zero else "normal",
        "nticks": 3 if is_log else 7,
        "automargin": True,
    }


def memory_unit(sizes: Sequence[float]) -> tuple[float, str]:
    """Return the bytes of a unit for these sizes, and its name."""
    return (2.0**30, " GiB") if max(sizes, default=0) >= 2**30 else (2.0**20, " MiB")


def marks(kind: str, points: Sequence[Reading], name: str | None = None) -> Part:
    """Draw points of a kind of `SYMBOLS`, named in the legend."""
    symbol, size, color = SYMBOLS[kind]
    marker = {"symbol": symbol, "size": size, "color": color, "line": {"width": 2}}
    return {"mode": "markers", "marker": marker, "name": name, **_readings(points)}


def line(
    style: str, points: Sequence[tuple[float, float]], text: Callable[[float], str] | None = None
) -> Part:
    """Draw a line through points; `text` says a value in words, if it is to be read."""
    shown: Part = {"mode": "lines", "line": STYLES[style]}
    if text is None:
        x, y = [x for x, _ in points], [y for _, y in points]
        return {**shown, "x": x, "y": y, "hoverinfo": "skip"}
    return {**shown, **_readings([(x, y, f"step {x:.0f}: {text(y)}") for x, y in points])}


def _readings(points: Sequence[Reading]) -> Part:
    return {
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "customdata": [printable_lines(tip) for _, _, tip in points],
        "hoverinfo": "text",
    }


def chart(title: str, traces: Sequence[Part], x: Part, y: Part, rules: Sequence[Rule] = ()) -> Part:
    """Return a figure as the templates take it, with at most two lines across as `rules`."""
    named = [{"type": "scatter", "showlegend": bool(t.get("name")), **t} for t in traces]
    shown = {way: [value for trace in named for value in trace[way]] for way in "xy"}
    axes = {"x": x, "y": y}
    shapes = [
        _rule(rule, side, axes[rule[0]], shown[rule[0]])
        for rule, side in zip(rules, ("end", "start"), strict=False)
    ]
    has_marks = any(trace["mode"] == "markers" for trace in named)
    layout = _LAYOUT | {"xaxis": x, "yaxis": y, "shapes": shapes, "hoverdistance": -1}
    layout["hovermode"] = "closest" if has_marks else "x"
    figure = {"data": named, "layout": layout}
    return {"title": title, "figure": json.dumps(figure, allow_nan=False)}


def _rule(rule: Rule, side: str, axis: Part, shown: Sequence[float]) -> Part:
    """A dashed line across, whose label stays on the chart wherever the line lies."""
    way, value, text = rule
    other = "y" if way == "x" else "x"
    has_room_below = (axis["type"], axis["rangemode"]) == ("linear", "tozero")
    is_lowest = way == "y" and value <= min(shown, default=0.0) and not has_room_below
    if way == "x":
        low, high = min(*shown, value), max(*shown, value)
        middle = (low * high) ** 0.5 if axis["type"] == "log" else (low + high) / 2
        side = "end" if value > middle else "start"
    label = {
        "text": text,
        "padding": 3,
        "textangle": 0,
        "textposition": side if way == "y" else "end",
        "xanchor": {"end": "right", "start": "left"}[side],
        "yanchor": "bottom" if is_lowest else "top",
    }
    return {
        "type": "line",
        **{f"{way}0": value, f"{way}1": value, f"{other}0": 0, f"{other}1": 1},
        f"{other}ref": f"{other} domain",
        "line": {"color": "--text", "width": 1.5, "dash": "dash"},
        "label": label,
    }


def thinned(
    values: Sequence[tuple[float, float]],
    keep: Callable[[Sequence[float]], float] = lambda values: values[-1],
) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: of neighbors the last `x`, and what `keep` makes of
    their `y`."""
    size = -(-len(values) // MAX_POINTS)
    chunks = [values[start : start + size] for start in range(0, len(values), max(1, size))]
    return [(chunk[-1][0], keep([y for _, y in chunk])) for chunk in chunks]
