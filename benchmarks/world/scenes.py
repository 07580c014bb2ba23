"""What the small world's model is trained on, and what it is never shown."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image

from autotune.demo.world import COLORS, GROUNDS, KNOWN_SHAPES, SIZE_PX, Figure, Scene, draw_centered

EXCLUDED_FILE = Path(__file__).with_name("excluded.txt")
EXCLUDED = frozenset(tuple(line.split()) for line in EXCLUDED_FILE.read_text().splitlines())
"""(color, shape, ground) that pretraining never sees."""


PLACES = {
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
}
MARGIN_PX = 3


def draw_placed(rng: random.Random, shape: str, color: str, ground: str, place: str) -> Scene:
    """One smaller figure at a side."""
    size = rng.uniform(26, 32)
    room = SIZE_PX - size - 2 * MARGIN_PX
    left, top = (
        MARGIN_PX
        + room * {0: rng.uniform(0.4, 0.6), -1: rng.uniform(0, 0.1), 1: rng.uniform(0.9, 1)}[side]
        for side in PLACES[place]
    )
    return Scene((Figure(shape, color, left, top, size),), ground, place)


def draw_pair(
    rng: random.Random, left: tuple[str, str], right: tuple[str, str], ground: str
) -> Scene:
    """Two figures (shape, color) side by side."""
    figures = []
    for start, (shape, color) in zip(
        (MARGIN_PX, SIZE_PX // 2 + MARGIN_PX), (left, right), strict=True
    ):
        size = rng.uniform(21, 25)
        across = start + rng.random() * (SIZE_PX // 2 - 2 * MARGIN_PX - size)
        figures.append(
            Figure(shape, color, across, SIZE_PX / 2 - size / 2 + rng.uniform(-4, 4), size)
        )
    return Scene(tuple(figures), ground)


def draw_scene(rng: random.Random, shapes: Sequence[str] = KNOWN_SHAPES) -> Scene:
    """A scene as in pretraining: mostly one large figure near the center, one in eight at a
    side, a few in pairs.
    """
    while True:
        ground = rng.choice(tuple(GROUNDS))
        pair = [(rng.choice(shapes), rng.choice(tuple(COLORS))) for _ in range(2)]
        if any((color, shape, ground) in EXCLUDED for shape, color in pair):
            continue
        kind = rng.random()
        if kind < 0.83:
            return draw_centered(rng, *pair[0], ground)
        if kind < 0.95:
            return draw_placed(rng, *pair[0], ground, rng.choice(tuple(PLACES)))
        return draw_pair(rng, pair[0], pair[1], ground)


def to_tensor(images: Sequence[Image]) -> torch.Tensor:
    """(images, 3, height, width) in [-1, 1]."""
    return (
        torch.stack(
            [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
        ).float()
        / 127.5
        - 1
    )


def psnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean over images, in dB; both within [-1, 1]."""
    mse = (x - y.clamp(-1, 1)).square().mean((1, 2, 3))
    return float((10 * torch.log10(4 / mse)).mean())
