"""The judge reads what was drawn, from nothing but the pixels, and noise tells it nothing."""

import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from autotune.demo.world import (
    COLORS,
    GROUNDS,
    KNOWN_SHAPES,
    NEW_SHAPES,
    SIZE_PX,
    Reading,
    Scene,
    draw_centered,
    read_image,
    score_image,
)

SHAPES = (*KNOWN_SHAPES, *NEW_SHAPES)
COUNT = 300


def any_scene(rng: random.Random) -> Scene:
    shape, color, ground = (rng.choice(tuple(names)) for names in (SHAPES, COLORS, GROUNDS))
    return draw_centered(rng, shape, color, ground)


def is_right(reading: Reading, scene: Scene) -> bool:
    seen = [(figure.shape, figure.color) for figure in reading.figures]
    centers = [figure.center for figure in reading.figures]
    return (reading.ground, seen) == (
        scene.ground,
        [(f.shape, f.color) for f in scene.figures],
    ) and all(
        abs(center[0] - (figure.left + figure.size / 2)) < 2
        and abs(center[1] - (figure.top + figure.size / 2)) < 2
        for center, figure in zip(centers, scene.figures, strict=True)
    )


def test_the_judge_agrees_with_the_truth_on_drawn_scenes() -> None:
    rng = random.Random(0)
    scenes = [any_scene(rng) for _ in range(COUNT)]
    assert np.mean([is_right(read_image(scene.draw()), scene) for scene in scenes]) >= 0.99


def test_noise_is_read_no_better_than_by_chance_and_scores_nothing() -> None:
    rng, noise = random.Random(0), np.random.default_rng(0)
    truths = [
        tuple(rng.choice(tuple(names)) for names in (SHAPES, COLORS, GROUNDS)) for _ in range(COUNT)
    ]
    pixels = noise.integers(0, 256, (COUNT, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    readings = [read_image(image) for image in images]
    seen = [
        (r.figures[0].shape, r.figures[0].color, r.ground) if r.figures else ("", "", r.ground)
        for r in readings
    ]
    for part, names in enumerate((SHAPES, COLORS, GROUNDS)):
        share = np.mean([one[part] == truth[part] for one, truth in zip(seen, truths, strict=True)])
        assert share < 1 / len(names) + 0.09  # four standard deviations
    assert (
        np.mean([score_image(image, *truth) for image, truth in zip(images, truths, strict=True)])
        < 0.03
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawn_shape_scores_high_and_as_any_other_shape_nothing(shape: str) -> None:
    image = draw_centered(random.Random(0), shape, "red", "white").draw()
    assert score_image(image, shape, "red", "white") > 0.9
    assert all(score_image(image, other, "red", "white") == 0 for other in SHAPES if other != shape)


def test_a_wrong_color_or_ground_costs_half_and_blur_costs_some() -> None:
    image = draw_centered(random.Random(0), "heart", "red", "white").draw()
    whole = score_image(image, "heart", "red", "white")
    assert (
        score_image(image, "heart", "blue", "white")
        == score_image(image, "heart", "red", "navy")
        == whole / 2
    )
    scores = [
        score_image(image.filter(ImageFilter.GaussianBlur(r)), "heart", "red", "white")
        for r in (0, 3, 5, 8)
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.5
