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
    draw_centered,
    read_image,
    score_image,
)

SHAPES = (*KNOWN_SHAPES, *NEW_SHAPES)
COUNT = 100


def truths() -> list[tuple[str, str, str]]:
    rng = random.Random(0)
    names = (SHAPES, tuple(COLORS), tuple(GROUNDS))
    return [tuple(rng.choice(each) for each in names) for _ in range(COUNT)]  # type: ignore[misc]


def test_judge_agrees_on_drawn_scenes():
    rng = random.Random(0)
    for truth in truths():
        scene = draw_centered(rng, *truth)
        reading = read_image(scene.draw())
        (seen,), (drawn,) = reading.figures, scene.figures
        assert (seen.shape, seen.color, reading.ground) == truth
        middle = (drawn.left + drawn.size / 2, drawn.top + drawn.size / 2)
        assert seen.center == pytest.approx(middle, abs=2)


def test_judge_scores_noise_as_chance():
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (COUNT, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    pairs = [(Image.fromarray(one), truth) for one, truth in zip(pixels, truths(), strict=True)]
    assert np.mean([score_image(image, *truth) for image, truth in pairs]) < 0.03
    grounds = [read_image(image).ground == truth[2] for image, truth in pairs]
    assert np.mean(grounds) < 1 / len(GROUNDS) + 0.16  # four standard deviations


@pytest.mark.parametrize("shape", SHAPES)
def test_judge_tells_shapes_apart(shape):
    image = draw_centered(random.Random(0), shape, "red", "white").draw()
    assert score_image(image, shape, "red", "white") > 0.9
    assert all(score_image(image, other, "red", "white") == 0 for other in SHAPES if other != shape)


def test_judge_halves_wrong_colors():
    image = draw_centered(random.Random(0), "heart", "red", "white").draw()
    whole = score_image(image, "heart", "red", "white")
    wrong = {score_image(image, "heart", *other) for other in (("blue", "white"), ("red", "navy"))}
    assert wrong == {whole / 2}
    blurred = (image.filter(ImageFilter.GaussianBlur(radius)) for radius in (0, 3, 5, 8))
    scores = [score_image(each, "heart", "red", "white") for each in blurred]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.5
