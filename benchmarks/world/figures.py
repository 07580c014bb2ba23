"""What the small world's model gets right: python benchmarks/world/figures.py MODEL [--output
FILE.json]

Judged by geometry (`autotune/demo/judge.py`): the judge itself on drawn scenes and on noise, then
200 prompts whose combinations of color, shape and ground pretraining never saw, then places and
pairs.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scenes import EXCLUDED, PLACES, draw_pair, draw_placed, draw_scene

from autotune.demo.judge import read_image
from autotune.demo.lesson import load_pipeline, sample_images
from autotune.demo.world import (
    COLORS,
    GROUNDS,
    KNOWN_SHAPES,
    NEW_SHAPES,
    SIZE_PX,
    Scene,
    draw_centered,
)


def excluded_prompts(per_combination: int) -> list[Scene]:
    rng = random.Random(7)
    return [
        draw_centered(rng, shape, color, ground)
        for _ in range(per_combination)
        for color, shape, ground in sorted(EXCLUDED)
    ]


def agreement(scene: Scene, image: Image.Image) -> dict[str, bool]:
    """What an image has right of a scene; several figures must all be right."""
    reading = read_image(image)
    seen = reading.figures
    if len(scene.figures) == 1 and seen:
        seen = (max(seen, key=lambda figure: figure.num_pixels),)
    right = {
        "color": [figure.color for figure in seen] == [figure.color for figure in scene.figures],
        "ground": reading.ground == scene.ground,
        "shape": [figure.shape for figure in seen] == [figure.shape for figure in scene.figures],
    }
    if scene.place:
        sides = PLACES[scene.place]
        third = SIZE_PX / 6
        offsets = [(at - SIZE_PX / 2) for at in seen[0].center] if seen else [0.0, 0.0]
        where = tuple(0 if abs(offset) < third / 2 else int(np.sign(offset)) for offset in offsets)
        right["place"] = where == sides
    return right | {"all": all(right.values())}


def shares(found: Sequence[dict[str, bool]]) -> dict[str, float]:
    return {name: round(float(np.mean([right[name] for right in found])), 3) for name in found[0]}


def judge(
    pipeline, scenes: Sequence[Scene], sheet: Path | None = None, first_seed: int = 0
) -> dict[str, float]:
    images = sample_images(pipeline, [scene.caption for scene in scenes], first_seed)
    if sheet:
        picture = Image.new("RGB", (10 * 66, -(-len(images) // 10) * 66))
        for number, image in enumerate(images):
            picture.paste(image, (number % 10 * 66, number // 10 * 66))
        picture.save(sheet)
    return shares([agreement(scene, image) for scene, image in zip(scenes, images, strict=True)])


def judge_the_judge(count: int = 1000) -> dict[str, dict[str, float]]:
    """On drawn scenes of all shapes, and on noise, against a truth drawn by chance."""
    rng, noise = random.Random(5), np.random.default_rng(5)
    scenes = [draw_scene(rng, shapes=(*KNOWN_SHAPES, *NEW_SHAPES)) for _ in range(count)]
    pixels = noise.integers(0, 256, (count, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    single = [
        draw_centered(rng, *(rng.choice(tuple(n)) for n in (KNOWN_SHAPES, COLORS, GROUNDS)))
        for _ in range(count)
    ]
    return {
        "drawn": shares([{"all": agreement(scene, scene.draw())["all"]} for scene in scenes]),
        "noise": shares(
            [agreement(scene, Image.fromarray(p)) for scene, p in zip(single, pixels, strict=True)]
        ),
    }


def other_prompts() -> dict[str, list[Scene]]:
    rng = random.Random(8)

    def pick() -> tuple[str, str]:
        return rng.choice(KNOWN_SHAPES), rng.choice(tuple(COLORS))

    grounds = tuple(GROUNDS)
    return {
        "places": [
            draw_placed(rng, *pick(), rng.choice(grounds), list(PLACES)[n % 4]) for n in range(40)
        ],
        "pairs": [draw_pair(rng, pick(), pick(), rng.choice(grounds)) for _ in range(40)],
    }


def main(model: Path, output: Path | None) -> None:
    torch.set_num_threads(1)
    pipeline = load_pipeline(model)
    found = judge_the_judge()
    found["excluded combinations"] = judge(
        pipeline, excluded_prompts(5), output and output.with_suffix(".png")
    )
    for name, scenes in other_prompts().items():
        found[name] = judge(
            pipeline, scenes, output and output.with_name(f"{output.stem}-{name}.png")
        )
    print(json.dumps(found, indent=1))
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    main(asked.model, asked.output)
