"""Makes what the demo needs: a small genuine pipeline with random weights, and a folder of captioned images."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.families.registry import family_named

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_IMAGES = 12
SIZE_PX = 64
COLOURS = {"red": "#d62728", "blue": "#1f77b4", "green": "#2ca02c", "orange": "#ff7f0e"}
SHAPES = ("circle", "square", "triangle")
GROUNDS = {"white": "#ffffff", "grey": "#bbbbbb", "black": "#101010"}


def make_demo(output: Path, family_name: str) -> tuple[Path, Path]:
    """Write the images and the pipeline below `output`; returns (model folder, image folder).

    Raises:
        InvalidInput: the folder is already in use, or the family is unknown.
    """
    family = family_named(family_name)
    model, images = output / "model", output / "images"
    if output.exists() and any(output.iterdir()):
        raise InvalidInput(f"the folder {output} is not empty", hint="choose another with --output, or remove it")
    captions = draw_images(images)
    family.write_small_pipeline(model, captions, seed=0)
    return model, images


def draw_images(folder: Path, count: int = NUM_IMAGES) -> list[str]:
    """Draw shapes on plain grounds, each with a caption beside it; returns the captions."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    captions = []
    for number in range(count):
        shape, (colour, ink) = SHAPES[number % len(SHAPES)], list(COLOURS.items())[number % len(COLOURS)]
        ground, paper = list(GROUNDS.items())[number // 4 % len(GROUNDS)]
        caption = f"a {colour} {shape} on a {ground} background"
        _draw(shape, ink, paper, rng).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(caption + "\n", encoding="utf-8")
        captions.append(caption)
    return captions


def _draw(shape: str, ink: str, paper: str, rng: random.Random) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE_PX, SIZE_PX), paper)
    draw = ImageDraw.Draw(image)
    left, top, size = rng.randint(4, 16), rng.randint(4, 16), rng.randint(32, 44)
    box = (left, top, left + size, top + size)
    if shape == "circle":
        draw.ellipse(box, fill=ink)
    elif shape == "square":
        draw.rectangle(box, fill=ink)
    else:
        draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=ink)
    return image
