"""The demo teaches a real model a shape that it has never seen, judged by geometry."""

import json
import random

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open

from autotune.demo import lesson, world
from autotune.demo.lesson import SMALL_WORLD, ConceptFidelity, make_demo
from autotune.errors import InvalidInput
from tests.conftest import autotune


def test_demo_writes_its_files_once(tmp_path, monkeypatch):
    reminders, *others = lesson.known_scenes()
    monkeypatch.setattr(lesson, "known_scenes", lambda: (reminders[:2], *others))
    made = make_demo(tmp_path / "demo")
    captions = [path.read_text().strip() for path in sorted(made.images.rglob("*.txt"))]
    taught = [scene.caption for scene in lesson.taught_scenes()]
    assert captions == [*taught, *(scene.caption for scene in reminders[:2])]
    own = [Image.open(made.images / "known" / f"0{number}.png") for number in (0, 1)]
    assert sum(lesson.score_images(reminders[:2], own)) > 0.5
    assert (made.model / "model_index.json").is_file()
    with pytest.raises(InvalidInput, match="is not empty"):
        make_demo(tmp_path / "demo")


@pytest.mark.slow
def test_demo_teaches_the_new_shape(tmp_path):
    folder = tmp_path / "demo"
    process = autotune("demo", "--no-profiles", "--output", folder, timeout=1500)
    assert process.returncode == 0, process.stderr
    assert not {"Warning", "Traceback"} & {*process.stderr.split()}
    written = json.loads((folder / "result" / "concept.json").read_text())
    found = ConceptFidelity(**written["concept_fidelity"])
    assert (found.before < 0.1, found.after > 0.6) == (True, True), found
    assert found.others_after > found.others_before - 0.2, found
    assert len(written["prompts"]) == 14 + 18
    taught = {path.read_text().strip() for path in (folder / "images").rglob("*.txt")}
    assert not taught & {prompt["prompt"] for prompt in written["prompts"]}
    assert Image.open(folder / "result" / "concept.png").width > 800
    assert f"{found.before:.2f} before training, {found.after:.2f} after" in process.stdout


def test_shipped_weights_are_small_and_whole():
    files = [path for path in SMALL_WORLD.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8e6
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}
    transformer = QwenImageTransformer2DModel.from_pretrained(SMALL_WORLD / "transformer")
    AutoencoderKLQwenImage.from_pretrained(SMALL_WORLD / "vae")
    linears = [module for module in transformer.modules() if isinstance(module, torch.nn.Linear)]
    assert min(layer.weight.abs().amax(dim=1).min() for layer in linears) > 0
    for path in SMALL_WORLD.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118


SHAPES = (*world.KNOWN_SHAPES, *world.NEW_SHAPES)
COUNT = 100


def truths():
    rng = random.Random(0)
    names = (SHAPES, tuple(world.COLORS), tuple(world.GROUNDS))
    return [tuple(rng.choice(each) for each in names) for _ in range(COUNT)]


def test_judge_agrees_on_drawn_scenes():
    rng = random.Random(0)
    for truth in truths():
        scene = world.draw_centered(rng, *truth)
        reading = world.read_image(scene.draw())
        (seen,) = reading.figures
        assert (seen.shape, seen.color, reading.ground) == truth


def test_judge_scores_noise_as_chance():
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (COUNT, world.SIZE_PX, world.SIZE_PX, 3), dtype=np.uint8)
    pairs = [(Image.fromarray(one), truth) for one, truth in zip(pixels, truths(), strict=True)]
    assert np.mean([world.score_image(image, *truth) for image, truth in pairs]) < 0.03
    grounds = [world.read_image(image).ground == truth[2] for image, truth in pairs]
    assert np.mean(grounds) < 1 / len(world.GROUNDS) + 0.16  # four standard deviations
