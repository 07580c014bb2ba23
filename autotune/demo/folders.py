"""Makes what the demo needs: a small genuine pipeline, and a folder of captioned images."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from autotune.demo.lesson import (
    NEW_SHAPE,
    OWN_GUIDANCE,
    PLAN_OPTIONS,
    TAUGHT_REPEATS,
    known_scenes,
    load_pipeline,
    sample_images,
    taught_scenes,
    write_images,
)
from autotune.errors import InvalidInput

SMALL_WORLD = Path(__file__).with_name("small_world")
"""The pretrained Qwen-Image pipeline; its README.md says what it can do."""


@dataclass(frozen=True)
class Demo:
    """Where the demo's material lies.

    Example:
        >>> demo = autotune.make_demo(Path("demo"))
        >>> demo.model, demo.images
    """

    model: Path
    images: Path
    new_shape: str = NEW_SHAPE
    """What the images teach."""
    plan_options: tuple[str, ...] = PLAN_OPTIONS
    """How `autotune plan` is to be asked for what the images teach."""


def make_demo(output: Path) -> Demo:
    """Write the data and the pipeline below `output`: a Qwen-Image that was pretrained on a small
    world, twelve pictures of a shape that it has never seen, and some that it draws itself, to be
    reminded of what it knows.

    Raises:
        InvalidInput: the folder is already in use.

    Example:
        >>> made = autotune.make_demo(Path("demo"))
        >>> autotune.plan(str(made.model), made.images, resolution=64)
    """
    if output.exists() and any(output.iterdir()):
        raise InvalidInput(
            f"the folder {output} is not empty", hint="choose another with --output, or remove it"
        )
    model, images = output / "model", output / "images"
    shutil.copytree(SMALL_WORLD, model)
    taught, (known, *_) = taught_scenes(), known_scenes()
    write_images(images, taught, [scene.draw() for scene in taught], repeats=TAUGHT_REPEATS)
    captions = [scene.caption for scene in known]
    drawn = sample_images(load_pipeline(model), captions, first_seed=0, guidance=OWN_GUIDANCE)
    write_images(images / "known", known, drawn)
    return Demo(model, images)
