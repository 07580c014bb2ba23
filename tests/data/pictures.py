"""Small image folders for the tests of the data room."""

from pathlib import Path

import numpy as np
from PIL import Image

CAPTIONS = ("a red fox in the snow", "a blue house by the sea", "two green pears")


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Noise: no two alike, and nothing that compresses."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_pictures(folder: Path, *sizes: tuple[int, int], first: int = 0) -> Path:
    """`000.png`, `001.png` ... of these sizes with a caption each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes, start=first):
        picture(number, width, height).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(CAPTIONS[number % len(CAPTIONS)], encoding="utf-8")
    return folder
