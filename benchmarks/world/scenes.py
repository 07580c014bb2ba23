"""What the small world's model is trained on, and what it is never shown."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image

from autotune.demo.world import COLORS, GROUNDS, KNOWN_SHAPES, PLACES, Scene, draw_centered, draw_pair, draw_placed

EXCLUDED_FILE = Path(__file__).with_name("excluded.txt")
EXCLUDED = frozenset(tuple(line.split()) for line in EXCLUDED_FILE.read_text().splitlines())
"""(color, shape, ground) that pretraining never sees."""


def draw_scene(rng: random.Random, shapes: Sequence[str] = KNOWN_SHAPES) -> Scene:
    """A scene as in pretraining: mostly one large figure near the center, one in eight at a side, a few in pairs."""
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
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).float() / 127.5 - 1


def psnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean over images, in dB; both within [-1, 1]."""
    mse = (x - y.clamp(-1, 1)).square().mean((1, 2, 3))
    return float((10 * torch.log10(4 / mse)).mean())
