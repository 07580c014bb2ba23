"""Makes what the demo needs: a small genuine pipeline, and a folder of captioned images."""

import random
import shutil
from dataclasses import dataclass, replace
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
from autotune.demo.world import COLORS, GROUNDS, KNOWN_SHAPES, Scene, draw_centered
from autotune.errors import InvalidInput
from autotune.families import get_family
from autotune.runtime import silence_progress_bars

NUM_IMAGES = 12
SMALL_WORLD = Path(__file__).with_name("small_world")
"""The pretrained Qwen-Image pipeline; its README.md says what it can do."""


@dataclass(frozen=True)
class Demo:
    """Where the demo's material lies.

    Example:
        >>> demo = autotune.make_demo(Path("demo"), "flux1-kontext")
        >>> demo.model, demo.images, demo.control
    """

    model: Path
    images: Path
    control: Path | None
    """Control images, for edit models."""
    num_frames: int
    """Above 1, each subfolder of `images` is a clip."""
    new_shape: str = ""
    """What the images teach a pretrained model; empty if its weights are random."""
    plan_options: tuple[str, ...] = ("--steps", "60")
    """How `autotune plan` is to be asked for what the images teach."""


def make_demo(output: Path, family_name: str) -> Demo:
    """Write the data and the pipeline below `output`.

    For Qwen-Image that is a pretrained model of a small world, twelve pictures of a shape that it
    has never seen, and some that it draws itself, to be reminded of what it knows. For other
    families weights are random.

    Raises:
        InvalidInput: the folder is already in use, or the family is unknown.

    Example:
        >>> made = autotune.make_demo(Path("demo"), "qwen-image")
        >>> autotune.plan(str(made.model), made.images, resolution=64)
    """
    family = get_family(family_name)
    if output.exists() and any(output.iterdir()):
        raise InvalidInput(
            f"the folder {output} is not empty", hint="choose another with --output, or remove it"
        )
    model, images = output / "model", output / "images"
    if family_name == "qwen-image":
        shutil.copytree(SMALL_WORLD, model)
        taught, (known, *_) = taught_scenes(), known_scenes()
        write_images(images, taught, [scene.draw() for scene in taught], repeats=TAUGHT_REPEATS)
        captions = [scene.caption for scene in known]
        drawn = sample_images(load_pipeline(model), captions, first_seed=0, guidance=OWN_GUIDANCE)
        write_images(images / "known", known, drawn)
        return Demo(
            model,
            images,
            control=None,
            num_frames=1,
            new_shape=NEW_SHAPE,
            plan_options=PLAN_OPTIONS,
        )
    num_frames = 1 + family.frames_per_latent if family.can_train_clips else 1
    captions = draw_images(images, num_frames=num_frames)
    control = output / "control" if family.max_controls else None
    if control:
        draw_images(control, is_control=True)
    silence_progress_bars()
    family.write_small_pipeline(model, captions, seed=0)
    return Demo(model, images, control, num_frames)


def draw_images(
    folder: Path, count: int = NUM_IMAGES, *, num_frames: int = 1, is_control: bool = False
) -> list[str]:
    """Draw shapes on plain grounds, each with a caption beside it; returns the captions.

    With several frames each shape moves through a clip in a subfolder. Control images are gray,
    without captions.
    """
    folder.mkdir(parents=True)
    rng = random.Random(0)
    captions = []
    for number in range(count):
        color, ground = list(COLORS)[number % 4], list(GROUNDS)[number // 4 % 3]
        scene = draw_centered(rng, KNOWN_SHAPES[number % 3], color, ground)
        captions.append(scene.caption)
        for frame in range(num_frames):
            path = (
                folder / f"{number:02d}.png"
                if num_frames == 1
                else folder / f"{number:02d}" / f"{frame:02d}.png"
            )
            path.parent.mkdir(exist_ok=True)
            image = _moved(scene, frame).draw()
            (image.convert("L").convert("RGB") if is_control else image).save(path)
        if not is_control:
            (folder / f"{number:02d}.txt").write_text(captions[-1] + "\n", encoding="utf-8")
    return captions


def _moved(scene: Scene, across: int) -> Scene:
    """The scene with its figures some pixels to the right."""
    return replace(
        scene, figures=tuple(replace(figure, left=figure.left + across) for figure in scene.figures)
    )
