"""Small genuine pipelines of every family, with random weights, and images to train them on."""

import random
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path

import diffusers
import torch

from autotune.demo.world import COLORS, GROUNDS, KNOWN_SHAPES, draw_centered
from autotune.models.family import Family
from autotune.models.registry import get_family


def shortest_clip(family: Family) -> int:
    frames = (number for number in count(2) if family.whole_frames(number) == number)
    return next(frames) if family.can_train_clips else 1


def write_small_pipeline(family: Family | str, folder: Path, captions: Sequence[str]) -> None:
    family = get_family(family) if isinstance(family, str) else family
    module = import_module(f"tests.small.{type(family).__module__.rpartition('.')[2]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = module.build_parts(family, captions)
    kind = getattr(diffusers, family.pipeline_class)
    if not issubclass(kind, diffusers.ModularPipeline):
        kind(**parts).save_pretrained(folder)
        return
    pipeline = kind()
    pipeline.update_components(**parts)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)


def draw_images(
    folder: Path, count: int = 12, *, num_frames: int = 1, is_control: bool = False
) -> list[str]:
    """Draw shapes on plain grounds, each with a caption beside it; returns the captions. With
    several frames each moves through a clip in a subfolder. Control images have no captions."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    captions = []
    for number in range(count):
        color, ground = list(COLORS)[number % 4], list(GROUNDS)[number // 4 % 3]
        scene = draw_centered(rng, KNOWN_SHAPES[number % 3], color, ground)
        captions.append(scene.caption)
        for frame in range(num_frames):
            name = f"{number:02d}.png" if num_frames == 1 else f"{number:02d}/{frame:02d}.png"
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            image = replace(scene, left=scene.left + frame).draw()
            (image.convert("L").convert("RGB") if is_control else image).save(path)
        if not is_control:
            (folder / f"{number:02d}.txt").write_text(captions[-1] + "\n", encoding="utf-8")
    return captions


def write_small(name: str, folder: Path) -> list[str]:
    """Write a family's pipeline and its data; returns the options of `autotune plan` for them."""
    family, options = get_family(name), ["--resolution", "64"]
    num_frames = shortest_clip(family)
    captions = draw_images(folder / "images", num_frames=num_frames)
    write_small_pipeline(family, folder / "model", captions)
    options += ["--model", str(folder / "model"), "--data", str(folder / "images")]
    if family.max_controls:
        draw_images(folder / "control", is_control=True)
        options += ["--control", str(folder / "control")]
    return [*options, "--frames", str(num_frames)] if num_frames > 1 else options
