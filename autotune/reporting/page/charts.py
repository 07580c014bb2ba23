"""Charts as SVG: markers and lines keep their size whatever the width, since labels are HTML beside the drawing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from autotune.reporting.page.html import Child, data_attribute, h

MAX_TICKS = 6
UNITS_PX = 1000
"""Side of the square that lines are drawn in, before it is stretched over the plot."""
WIDE_RATIO = 8.0
"""Largest over smallest value from which an axis is logarithmic."""
MAX_POINTS = 300
"""Points of a line: more than a screen shows would only make the page larger."""


@dataclass(frozen=True)
class Axis:
    """From values to shares of the plot, in [0, 1]."""

    low: float
    high: float
    label: str
    text: Callable[[float], str]
    is_log: bool = False
    unit: float = 1.0
    """What ticks are whole multiples of, such as a GiB."""

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        label: str,
        text: Callable[[float], str],
        *,
        unit: float = 1.0,
        can_log: bool = True,
        from_zero: bool = False,
    ) -> "Axis":
        """An axis with all `values` on it and some room around them."""
        known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(known), max(known)
        if can_log and low > 0 and high / low > WIDE_RATIO:
            room = (high / low) ** 0.06
            return cls(low / room, high * room, label, text, True, unit)
        room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(0.0 if from_zero and low >= 0 else low - room, high + room, label, text, False, unit)

    def share(self, value: float) -> float:
        """Where a value lies, 0 to 1; what is off the axis lies on its end."""
        if self.is_log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        low, high = self.low / self.unit, self.high / self.unit
        if self.is_log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            marks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        else:
            rough = (high - low) / (MAX_TICKS - 1)
            size = 10.0 ** math.floor(math.log10(rough))
            step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
            marks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
        marks = [mark for mark in marks if low <= mark <= high]
        return [mark * self.unit for mark in marks[:: -(-len(marks) // MAX_TICKS)]] if marks else []


@dataclass(frozen=True)
class Mark:
    """One point of a chart: what it looks like and what is read of it."""

    x: float
    y: float
    shape: str
    """A class of the style sheet, and a name of `SHAPES`."""
    tip: str


SHAPES = {
    "predicted": "M-5,0 A5,5 0 1,0 5,0 A5,5 0 1,0 -5,0 Z",
    "measured": "M-5.5,0 A5.5,5.5 0 1,0 5.5,0 A5.5,5.5 0 1,0 -5.5,0 Z",
    "beyond": "M-4,-4 L4,4 M-4,4 L4,-4",
    "failed": "M-6,-6 H6 V6 H-6 Z M-3.5,-3.5 L3.5,3.5 M-3.5,3.5 L3.5,-3.5",
    "chosen": "M0,-11 L11,0 L0,11 L-11,0 Z",
}
"""Paths around the origin, in CSS pixels."""


def shape(kind: str) -> Element:
    """A marker as a legend shows it."""
    return h("svg", h("path", d=SHAPES[kind], class_=f"mark {kind}"), class_="key", viewBox="-13 -13 26 26", width=20)


@dataclass(frozen=True)
class Line:
    """A line of a chart through points whose `x` rises."""

    points: Sequence[tuple[float, float]]
    style: str
    """A class of the style sheet."""
    is_stepped: bool = False


def chart(
    x: Axis,
    y: Axis,
    *,
    title: str,
    marks: Sequence[Mark] = (),
    lines: Sequence[Line] = (),
    rules: Sequence[tuple[str, float, str]] = (),
    legend: Child = None,
    readings: Sequence[tuple[float, float, str]] = (),
) -> Element:
    """A figure that can be read by pointer, by keyboard, and without any script by its labels.

    Args:
        x: horizontal axis.
        y: vertical axis.
        title: what the chart shows, in a sentence.
        marks: points.
        lines: drawn under the points.
        rules: straight lines across: (`x` or `y`, value, label).
        legend: what the shapes mean.
        readings: what is read at (x, y) instead of the marks' tips.
    """
    values = [*readings] or [(mark.x, mark.y, mark.tip) for mark in marks]
    points = [[round(100 * x.share(a), 2), round(100 - 100 * y.share(b), 2), tip] for a, b, tip in values]
    drawing = h(
        "svg",
        _grid(x, y),
        _lines(x, y, lines),
        (_rule(x if way == "x" else y, way, value) for way, value, _ in rules),
        (_mark(x, y, mark) for mark in marks),
        h("g", class_="cursor"),
        aria_hidden="true",
    )
    plot = h(
        "div",
        drawing,
        (_rule_label(x if way == "x" else y, way, value, text) for way, value, text in rules),
        class_="plot",
        tabindex=0,
        role="group",
        aria_label=f"{title} Move through it with the arrow keys.",
        data_points=data_attribute(points),
    )
    hint = "Point at the chart, or focus it and use the arrow keys, to read it."
    return h(
        "figure",
        h("figcaption", title),
        legend,
        h(
            "div",
            h("div", y.label, class_="y-label"),
            h("div", (_tick(y, value, "bottom") for value in y.ticks()), class_="y-ticks", aria_hidden="true"),
            plot,
            h("div", (_tick(x, value, "left") for value in x.ticks()), class_="x-ticks", aria_hidden="true"),
            h("div", x.label, class_="x-label"),
            class_="chart",
        ),
        h("p", hint, class_="readout", role="status"),
    )


def _grid(x: Axis, y: Axis) -> list[Element]:
    across = [_straight("y", 1 - y.share(value), "grid") for value in y.ticks()]
    return across + [_straight("x", x.share(value), "grid") for value in x.ticks()]


def _straight(way: str, share: float, style: str) -> Element:
    at = f"{100 * share:.2f}%"
    ends = (
        {"x1": at, "x2": at, "y1": "0%", "y2": "100%"} if way == "x" else {"y1": at, "y2": at, "x1": "0", "x2": "100%"}
    )
    return h("line", class_=style, **ends)


def _rule(axis: Axis, way: str, value: float) -> Element:
    share = axis.share(value)
    return _straight(way, share if way == "x" else 1 - share, "rule")


def _rule_label(axis: Axis, way: str, value: float, text: str) -> Element:
    share = axis.share(value)
    if way == "y":
        return h("span", text, class_="rule-label", style=f"bottom:{100 * share:.2f}%;right:4px")
    side = (
        f"right:{100 - 100 * share:.2f}%;padding-right:4px"
        if share > 0.4
        else f"left:{100 * share:.2f}%;padding-left:4px"
    )
    return h("span", text, class_="rule-label", style=f"top:2px;{side}")


def _tick(axis: Axis, value: float, side: str) -> Element:
    return h("span", axis.text(value), style=f"{side}:{100 * axis.share(value):.2f}%")


def _mark(x: Axis, y: Axis, mark: Mark) -> Element:
    path = h("path", h("title", mark.tip), d=SHAPES[mark.shape], class_=f"mark {mark.shape}")
    return h(
        "svg", path, x=f"{100 * x.share(mark.x):.2f}%", y=f"{100 - 100 * y.share(mark.y):.2f}%", overflow="visible"
    )


def _lines(x: Axis, y: Axis, lines: Sequence[Line]) -> Element:
    paths = (h("path", d=_path(x, y, line), class_=f"line {line.style}") for line in lines if line.points)
    return h(
        "svg", *paths, viewBox=f"0 0 {UNITS_PX} {UNITS_PX}", preserveAspectRatio="none", width="100%", height="100%"
    )


def _path(x: Axis, y: Axis, line: Line) -> str:
    places = [(UNITS_PX * x.share(a), UNITS_PX - UNITS_PX * y.share(b)) for a, b in line.points]
    parts = [f"M{places[0][0]:.1f},{places[0][1]:.1f}"]
    for left, top in places[1:]:
        parts.append(f"H{left:.1f}V{top:.1f}" if line.is_stepped else f"L{left:.1f},{top:.1f}")
    return "".join(parts)


def thinned(
    values: Sequence[tuple[float, float]], keep: Callable[[Sequence[float]], float]
) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points: of each run of neighbors the last `x`, and what `keep` makes of their `y`."""
    size = -(-len(values) // MAX_POINTS)
    chunks = [values[start : start + size] for start in range(0, len(values), max(1, size))]
    return [(chunk[-1][0], keep([y for _, y in chunk])) for chunk in chunks]
