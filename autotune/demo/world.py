"""The demo's small world: colored shapes on plain grounds, with captions. It is drawn, so what
is true is known."""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIZE_PX = 64
COLORS = {
    "red": "#d62728",
    "blue": "#1f77b4",
    "green": "#2ca02c",
    "orange": "#ff7f0e",
    "purple": "#8e44ad",
    "yellow": "#f2d21b",
    "pink": "#ff8fc8",
    "cyan": "#17becf",
}
GROUNDS = {
    "white": "#ffffff",
    "gray": "#bbbbbb",
    "black": "#101010",
    "sand": "#eedcb4",
    "navy": "#1b2a55",
}
KNOWN_SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
"""What the small world's model was trained on."""
NEW_SHAPES = ("heart", "arrow")
"""What it has never seen."""
OVERSAMPLING = 4

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """One shape in a scene."""

    shape: str
    color: str
    left: float
    top: float
    size: float
    """Side of its bounding square; like the two fields before, in pixels."""


@dataclass(frozen=True)
class Scene:
    """One or two figures on a ground; two stand left and right."""

    figures: tuple[Figure, ...]
    ground: str
    place: str = ""
    """Where the caption says that a single figure is: as `on the left`, or empty."""

    @property
    def caption(self) -> str:
        """What the scene shows, as the model reads it."""
        names = " and ".join(
            f"{'an' if figure.color == 'orange' else 'a'} {figure.color} {figure.shape}"
            for figure in self.figures
        )
        return f"{names} on a {self.ground} background" + (f", {self.place}" if self.place else "")

    def draw(self) -> Image.Image:
        """The scene as an image of 64 px."""
        image = Image.new(
            "RGB", (SIZE_PX * OVERSAMPLING, SIZE_PX * OVERSAMPLING), GROUNDS[self.ground]
        )
        draw = ImageDraw.Draw(image)
        for figure in self.figures:
            place = (figure.left, figure.top, figure.size)
            draw.polygon(_scaled(outline(figure.shape), *place), fill=COLORS[figure.color])
        return image.reduce(OVERSAMPLING)


def draw_centered(rng: random.Random, shape: str, color: str, ground: str) -> Scene:
    """One large figure near the center."""
    size = rng.uniform(38, 46)
    left, top = (SIZE_PX / 2 - size / 2 + rng.uniform(-2, 2) for _ in range(2))
    return Scene((Figure(shape, color, left, top, size),), ground)


def outline(shape: str) -> Points:
    """A shape's corners, clockwise or not, in the unit square that they fill.

    Raises:
        KeyError: there is no such shape.
    """
    quarter = -math.pi / 2
    match shape:
        case "circle":
            points = _around(64, [0.5], quarter)
        case "square":
            points = [(0, 0), (1, 0), (1, 1), (0, 1)]
        case "triangle":
            points = [(0, 1), (1, 1), (0.5, 0)]
        case "diamond":
            points = [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]
        case "cross":
            a, b = 0.32, 0.68
            points = [
                (a, 0),
                (b, 0),
                (b, a),
                (1, a),
                (1, b),
                (b, b),
                (b, 1),
                (a, 1),
                (a, b),
                (0, b),
                (0, a),
                (a, a),
            ]
        case "star":
            points = _around(10, [0.5, 0.21], quarter)
        case "heart":
            turns = [2 * math.pi * step / 80 for step in range(80)]
            lobes = [
                13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
                for t in turns
            ]
            points = [(16 * math.sin(t) ** 3, -lobe) for t, lobe in zip(turns, lobes, strict=True)]
        case "arrow":
            points = [(0, 0.34), (0.5, 0.34), (0.5, 0), (1, 0.5), (0.5, 1), (0.5, 0.66), (0, 0.66)]
        case _:
            raise KeyError(shape)
    return _filling(points)


def _around(count: int, radii: list[float], phase: float) -> Points:
    """`count` points around a center, at the radii in turn."""
    angles = [phase + 2 * math.pi * step / count for step in range(count)]
    return [
        (radii[step % len(radii)] * math.cos(angle), radii[step % len(radii)] * math.sin(angle))
        for step, angle in enumerate(angles)
    ]


def _filling(points: Points) -> Points:
    lows, highs = (tuple(pick(axis) for axis in zip(*points, strict=True)) for pick in (min, max))
    return [
        ((x - lows[0]) / (highs[0] - lows[0]), (y - lows[1]) / (highs[1] - lows[1]))
        for x, y in points
    ]


def _scaled(points: Points, left: float, top: float, size: float) -> Points:
    return [((left + x * size) * OVERSAMPLING, (top + y * size) * OVERSAMPLING) for x, y in points]
