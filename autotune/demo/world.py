"""The small world: scenes, and a judge that tells by geometry alone what an image shows."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw

Array = np.ndarray[Any, Any]

# Distance in RGB from the ground that makes a figure: half of the faintest pair, pink on sand.
CONTRAST = 35.0
MIN_PIXELS = 40
GAP_PX = 3  # empty columns between two figures
GRID = 48  # side of the templates that figures are compared with
# Overlap of two different shapes, which counts as no likeness, and that of full likeness.
FLOOR, CEILING = 0.6, 0.92


@dataclass(frozen=True)
class Seen:
    """A figure found in an image, with the nearest named color."""

    color: str
    overlaps: dict[str, float]  # intersection over union with each shape
    num_pixels: int

    @property
    def shape(self) -> str:
        return max(self.overlaps, key=lambda shape: self.overlaps[shape])


@dataclass(frozen=True)
class Reading:
    """The ground and the figures, from left to right, that an image shows."""

    ground: str
    figures: tuple[Seen, ...]


def read_image(image: Image.Image) -> Reading:
    """Find the ground, by the image's border, and the figures, by the columns that differ."""
    pixels: Array = np.asarray(image.convert("RGB"), dtype=np.float32)
    sides = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    paper = np.median(np.concatenate([side.reshape(-1, 3) for side in sides]), axis=0)
    contrast: Array = np.linalg.norm(pixels - paper, axis=2)
    figures = []
    for columns in _runs((contrast > CONTRAST).sum(axis=0) >= 2):
        if (contrast[:, columns] > CONTRAST).sum() >= MIN_PIXELS:
            figures.append(_read_figure(pixels[:, columns], contrast[:, columns]))
    return Reading(_nearest(paper, GROUNDS), tuple(figures))


def score_image(image: Image.Image, shape: str, color: str, ground: str) -> float:
    """Score in 0 to 1 how well an image shows one figure. Zero if it looks more like another shape;
    else its overlap between `FLOOR` and `CEILING`, times the share of color and ground that are
    right."""
    reading = read_image(image)
    if not reading.figures:
        return 0.0
    seen = max(reading.figures, key=lambda figure: figure.num_pixels)
    if seen.shape != shape:
        return 0.0
    likeness = min(max((seen.overlaps[shape] - FLOOR) / (CEILING - FLOOR), 0.0), 1.0)
    return likeness * ((seen.color == color) + (reading.ground == ground)) / 2


def _read_figure(pixels: Array, contrast: Array) -> Seen:
    drawn = contrast[contrast > CONTRAST]
    coverage = np.clip(contrast / np.median(drawn[drawn >= np.median(drawn)]), 0, 1)
    rows, columns = (np.flatnonzero((coverage > 0.5).any(axis=axis)) for axis in (1, 0))
    ink = np.median(pixels[coverage > 0.8], axis=0)
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    return Seen(
        color=_nearest(ink, COLORS),
        overlaps=_overlaps(coverage, (left, top, right, bottom)),
        num_pixels=int((coverage > 0.5).sum()),
    )


def _overlaps(coverage: Array, box: tuple[int, int, int, int]) -> dict[str, float]:
    left, top, right, bottom = box
    side = max(right - left, bottom - top)
    left, top = left - (side - (right - left)) // 2, top - (side - (bottom - top)) // 2
    found = Image.fromarray(coverage).crop((left, top, left + side, top + side))
    seen = np.asarray(found.resize((GRID, GRID), Image.Resampling.BILINEAR))
    overlaps = {}
    for shape in (*KNOWN_SHAPES, *NEW_SHAPES):
        template = _template(shape)
        overlaps[shape] = float(np.minimum(seen, template).sum() / np.maximum(seen, template).sum())
    return overlaps


@cache
def _template(shape: str) -> Array:
    image, side = Image.new("L", (GRID * 8, GRID * 8)), GRID * 8
    ImageDraw.Draw(image).polygon([(x * side, y * side) for x, y in outline(shape)], fill=255)
    return np.asarray(image.reduce(8), dtype=np.float32) / 255


def _nearest(color: Array, names: dict[str, str]) -> str:
    def distance(name: str) -> float:
        return float(np.linalg.norm(color - np.array(ImageColor.getrgb(names[name]))))

    return min(names, key=distance)


def _runs(filled: Sequence[bool] | Any) -> list[slice]:
    runs: list[slice] = []
    for column in np.flatnonzero(filled):
        if runs and column - runs[-1].stop < GAP_PX:
            runs[-1] = slice(runs[-1].start, int(column) + 1)
        else:
            runs.append(slice(int(column), int(column) + 1))
    return runs


SIZE_PX = 64
COLORS = {
    "red": "#d62728", "blue": "#1f77b4", "green": "#2ca02c", "orange": "#ff7f0e",
    "purple": "#8e44ad", "yellow": "#f2d21b", "pink": "#ff8fc8", "cyan": "#17becf",
}  # fmt: skip
GROUNDS = {
    "white": "#ffffff", "gray": "#bbbbbb", "black": "#101010", "sand": "#eedcb4", "navy": "#1b2a55"
}  # fmt: skip
# What the small world's model was trained on.
KNOWN_SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
NEW_SHAPES = ("heart", "arrow")
OVERSAMPLING = 4

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Scene:
    """One figure on a ground."""

    shape: str
    color: str
    left: float
    top: float
    size: float  # of its bounding square; in pixels, like its corner
    ground: str

    @property
    def caption(self) -> str:
        article = "an" if self.color.startswith("o") else "a"
        return f"{article} {self.color} {self.shape} on a {self.ground} background"

    def draw(self) -> Image.Image:
        side = SIZE_PX * OVERSAMPLING
        image = Image.new("RGB", (side, side), GROUNDS[self.ground])
        left, top, size = self.left, self.top, self.size
        points = [(left + x * size, top + y * size) for x, y in outline(self.shape)]
        drawn = [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in points]
        ImageDraw.Draw(image).polygon(drawn, fill=COLORS[self.color])
        return image.reduce(OVERSAMPLING)


def draw_centered(rng: random.Random, shape: str, color: str, ground: str) -> Scene:
    """Draw one large figure near the center."""
    size = rng.uniform(38, 46)
    left, top = (SIZE_PX / 2 - size / 2 + rng.uniform(-2, 2) for _ in range(2))
    return Scene(shape, color, left, top, size, ground)


def outline(shape: str) -> Points:
    """Return a shape's corners in the unit square that they fill."""
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
                (a, 0), (b, 0), (b, a), (1, a), (1, b), (b, b),
                (b, 1), (a, 1), (a, b), (0, b), (0, a), (a, a),
            ]  # fmt: skip
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
    xs, ys = zip(*points, strict=True)
    left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    return [((x - left) / width, (y - top) / height) for x, y in points]


def _around(count: int, radii: list[float], phase: float) -> Points:
    points = []
    for step in range(count):
        radius, angle = radii[step % len(radii)], phase + 2 * math.pi * step / count
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return points
