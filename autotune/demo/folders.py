"""Makes what the demo needs: a small genuine pipeline with random weights, and a folder of captioned images."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.families import get_family

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_IMAGES = 12
SIZE_PX = 64
CLIP_FRAMES = 5
COLORS = {"red": "#d62728", "blue": "#1f77b4", "green": "#2ca02c", "orange": "#ff7f0e"}
SHAPES = ("circle", "square", "triangle")
GROUNDS = {"white": "#ffffff", "gray": "#bbbbbb", "black": "#101010"}


@dataclass(frozen=True)
class Demo:
    """Where the demo's material lies."""

    model: Path
    images: Path
    control: Path | None
    """Control images, for edit models."""
    num_frames: int
    """Above 1, each subfolder of `images` is a clip."""


def make_demo(output: Path, family_name: str) -> Demo:
    """Write the data and the pipeline below `output`.

    Raises:
        InvalidInput: the folder is already in use, or the family is unknown.
    """
    family = get_family(family_name)
    if output.exists() and any(output.iterdir()):
        raise InvalidInput(f"the folder {output} is not empty", hint="choose another with --output, or remove it")
    demo = Demo(
        model=output / "model",
        images=output / "images",
        control=output / "control" if family.max_controls else None,
        num_frames=CLIP_FRAMES if family.can_train_clips else 1,
    )
    captions = draw_images(demo.images, num_frames=demo.num_frames)
    if demo.control:
        draw_images(demo.control, ink="#808080", captioned=False)
    family.write_small_pipeline(demo.model, captions, seed=0)
    return demo


def draw_images(
    folder: Path, count: int = NUM_IMAGES, *, num_frames: int = 1, ink: str | None = None, captioned: bool = True
) -> list[str]:
    """Draw shapes on plain grounds, each with a caption beside it; returns the captions.

    With several frames each shape moves through a clip in a subfolder; `ink` draws all in one color.
    """
    folder.mkdir(parents=True)
    rng = random.Random(0)
    captions = []
    for number in range(count):
        shape, (color, own_ink) = SHAPES[number % len(SHAPES)], list(COLORS.items())[number % len(COLORS)]
        ground, paper = list(GROUNDS.items())[number // 4 % len(GROUNDS)]
        captions.append(f"a {color} {shape} on a {ground} background")
        box = (rng.randint(4, 16), rng.randint(4, 16), rng.randint(32, 44))
        for frame in range(num_frames):
            path = folder / f"{number:02d}.png" if num_frames == 1 else folder / f"{number:02d}" / f"{frame:02d}.png"
            path.parent.mkdir(exist_ok=True)
            _draw(shape, ink or own_ink, paper, (box[0] + frame, *box[1:])).save(path)
        if captioned:
            (folder / f"{number:02d}.txt").write_text(captions[-1] + "\n", encoding="utf-8")
    return captions


def _draw(shape: str, ink: str, paper: str, place: tuple[int, int, int]) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE_PX, SIZE_PX), paper)
    draw = ImageDraw.Draw(image)
    left, top, size = place
    box = (left, top, left + size, top + size)
    if shape == "circle":
        draw.ellipse(box, fill=ink)
    elif shape == "square":
        draw.rectangle(box, fill=ink)
    else:
        draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=ink)
    return image
