"""Tells by geometry alone, without a network, what an image of the small world shows and how
well."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from autotune.demo.world import COLORS, GROUNDS, KNOWN_SHAPES, NEW_SHAPES, outline

Array = np.ndarray[Any, Any]

CONTRAST = 35.0
"""Distance in RGB from the ground that makes a pixel part of a figure: half of the faintest
pair, pink on sand."""
MIN_PIXELS = 40
GAP_PX = 3
"""Empty columns between two figures."""
GRID = 48
"""Side of the templates that figures are compared with."""
FLOOR, CEILING = 0.6, 0.92
"""Overlap that counts as no likeness, about that of two different shapes, and that counts as
full likeness."""


@dataclass(frozen=True)
class Seen:
    """A figure found in an image."""

    color: str
    """The nearest of the named colors."""
    overlaps: dict[str, float]
    """Intersection over union with each shape, in 0 to 1."""
    center: tuple[float, float]
    """Across and down, in pixels."""
    num_pixels: int

    @property
    def shape(self) -> str:
        """The shape that overlaps most."""
        return max(self.overlaps, key=lambda shape: self.overlaps[shape])


@dataclass(frozen=True)
class Reading:
    """What an image shows."""

    ground: str
    """The nearest of the named grounds."""
    figures: tuple[Seen, ...]
    """From left to right."""


def read_image(image: Image.Image) -> Reading:
    """Find the ground, by the image's border, and the figures, by the columns that differ from
    it."""
    pixels: Array = np.asarray(image.convert("RGB"), dtype=np.float32)
    sides = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    paper = np.median(np.concatenate([side.reshape(-1, 3) for side in sides]), axis=0)
    contrast: Array = np.linalg.norm(pixels - paper, axis=2)
    figures = []
    for columns in _runs((contrast > CONTRAST).sum(axis=0) >= 2):
        if (contrast[:, columns] > CONTRAST).sum() >= MIN_PIXELS:
            figures.append(_read_figure(pixels[:, columns], contrast[:, columns], columns.start))
    return Reading(_nearest(paper, GROUNDS), tuple(figures))


def score_image(image: Image.Image, shape: str, color: str, ground: str) -> float:
    """How well an image shows one figure: 0 to 1.

    Zero when it looks more like another shape; else its overlap between `FLOOR` and `CEILING`,
    times the share of color and ground that are right.
    """
    reading = read_image(image)
    if not reading.figures:
        return 0.0
    seen = max(reading.figures, key=lambda figure: figure.num_pixels)
    if seen.shape != shape:
        return 0.0
    likeness = min(max((seen.overlaps[shape] - FLOOR) / (CEILING - FLOOR), 0.0), 1.0)
    return likeness * ((seen.color == color) + (reading.ground == ground)) / 2


def _read_figure(pixels: Array, contrast: Array, start: int) -> Seen:
    drawn = contrast[contrast > CONTRAST]
    coverage = np.clip(contrast / np.median(drawn[drawn >= np.median(drawn)]), 0, 1)
    rows, columns = (np.flatnonzero((coverage > 0.5).any(axis=axis)) for axis in (1, 0))
    ink = np.median(pixels[coverage > 0.8], axis=0)
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    return Seen(
        color=_nearest(ink, COLORS),
        overlaps=_overlaps(coverage, (left, top, right, bottom)),
        center=(start + (left + right) / 2, (top + bottom) / 2),
        num_pixels=int((coverage > 0.5).sum()),
    )


def _overlaps(coverage: Array, box: tuple[int, int, int, int]) -> dict[str, float]:
    """Compare what lies in the box, widened to a square, with every shape."""
    left, top, right, bottom = box
    side = max(right - left, bottom - top)
    left, top = left - (side - (right - left)) // 2, top - (side - (bottom - top)) // 2
    found = Image.fromarray(coverage).crop((left, top, left + side, top + side))
    seen = np.asarray(found.resize((GRID, GRID), Image.Resampling.BILINEAR))
    return {
        shape: float(
            np.minimum(seen, _template(shape)).sum() / np.maximum(seen, _template(shape)).sum()
        )
        for shape in (*KNOWN_SHAPES, *NEW_SHAPES)
    }


@cache
def _template(shape: str) -> Array:
    image = Image.new("L", (GRID * 8, GRID * 8))
    ImageDraw.Draw(image).polygon(
        [(x * GRID * 8, y * GRID * 8) for x, y in outline(shape)], fill=255
    )
    return np.asarray(image.reduce(8), dtype=np.float32) / 255


def _nearest(color: Array, names: dict[str, str]) -> str:
    def distance(name: str) -> float:
        return float(
            np.linalg.norm(color - np.array([int(names[name][i : i + 2], 16) for i in (1, 3, 5)]))
        )

    return min(names, key=distance)


def _runs(filled: Sequence[bool] | Any) -> list[slice]:
    """Runs of filled columns; gaps narrower than `GAP_PX` are part of a run."""
    runs: list[slice] = []
    for column in np.flatnonzero(filled):
        if runs and column - runs[-1].stop < GAP_PX:
            runs[-1] = slice(runs[-1].start, int(column) + 1)
        else:
            runs.append(slice(int(column), int(column) + 1))
    return runs
