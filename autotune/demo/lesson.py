"""The demo's lesson: material, training options, and the judgment, with a picture."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from autotune.demo import world
from autotune.errors import InvalidInput
from autotune.models.registry import get_family
from autotune.system import files, process

SIDE_PX, SMALL_PX, GAP_PX, TEXT_PX, FONT_PX = 112, 64, 10, 190, 17
PAPER, INK, MUTED = "#ffffff", "#202020", "#707070"
# Of a prompt and its two images; two such blocks stand side by side.
BLOCK_PX = TEXT_PX + 2 * (SIDE_PX + GAP_PX) + GAP_PX


def draw_picture(
    taught: Sequence[Image.Image], rows: Sequence[tuple[str, Image.Image, Image.Image]]
) -> Image.Image:
    """Draw the taught images, then prompts in two columns with images before and after."""
    font = ImageFont.load_default(FONT_PX)
    lines = -(-len(rows) // 2)
    titles_at = 5 * GAP_PX + SMALL_PX
    height = titles_at + 3 * GAP_PX + lines * (SIDE_PX + GAP_PX)
    picture = Image.new("RGB", (2 * BLOCK_PX, height), PAPER)
    draw = ImageDraw.Draw(picture)

    def put(image: Image.Image, left: int, top: int, side: int) -> None:
        picture.paste(image.resize((side, side), Image.Resampling.BICUBIC), (left, top))
        draw.rectangle((left - 1, top - 1, left + side, top + side), outline="#dddddd")

    title = f"taught with these {len(taught)} pictures"
    draw.text((GAP_PX, GAP_PX // 2), title, fill=MUTED, font=font)
    for number, image in enumerate(taught):
        put(image, GAP_PX + number * (SMALL_PX + GAP_PX - 1), 3 * GAP_PX, SMALL_PX)
    for number, (prompt, *images) in enumerate(rows):
        left, down = number // lines * BLOCK_PX + GAP_PX, titles_at + 3 * GAP_PX
        down += number % lines * (SIDE_PX + GAP_PX)
        words = prompt.replace(" on a ", "\non a ").replace(" background", "\nbackground")
        draw.text((left, down + SIDE_PX // 2 - 2 * FONT_PX), words, fill=INK, font=font)
        for image, title in zip(images, ("before", "after"), strict=True):
            place = left + TEXT_PX + (title == "after") * (SIDE_PX + GAP_PX)
            draw.text((place, titles_at), title, fill=MUTED, font=font)
            put(image, place, down, SIDE_PX)
    return picture


NEW_SHAPE = "heart"
TAUGHT_COLORS, TAUGHT_GROUNDS = ("red", "blue", "green", "orange"), ("white", "gray", "black")
# Chosen as the next two (`benchmarks/DECISIONS.md`), on prompts that are not reported.
PLAN_OPTIONS = (
    *("--targets", "attention+mlp", "--batch-size", "8", "--steps", "300", "--timestep-shift", "1"),
    *("--learning-rate", "4e-3", "--lr-scheduler", "cosine"),
)
TAUGHT_REPEATS = 4  # times that each of the twelve is seen per view of the model's own images
OWN_GUIDANCE = 2.0  # of what the model draws itself; more makes training on it exaggerate
GUIDANCE = 4.0
REPORTED_SEED = 1000


@dataclass(frozen=True)
class ConceptFidelity:
    """Share of unseen prompts that are followed: 0 not at all, 1 as well as the VAE can show.
    `others` are shapes that the model knew. Means of `score_image`, divided by those of drawn
    scenes that went through the VAE."""

    before: float
    after: float
    others_before: float
    others_after: float


def taught_scenes(shape: str = NEW_SHAPE) -> list[world.Scene]:
    """Draw the twelve pictures: the shape in four colors on three grounds."""
    rng = random.Random(5)
    pairs = product(TAUGHT_COLORS, TAUGHT_GROUNDS)
    return [world.draw_centered(rng, shape, color, ground) for color, ground in pairs]


def unseen_scenes() -> list[world.Scene]:
    """Draw the shape in all other colors and grounds; even ones are reported, odd ones tuned by."""
    rng = random.Random(6)
    taught = set(product(TAUGHT_COLORS, TAUGHT_GROUNDS))
    combinations = [pair for pair in product(world.COLORS, world.GROUNDS) if pair not in taught]
    rng.shuffle(combinations)
    return [world.draw_centered(rng, NEW_SHAPE, *combination) for combination in combinations]


def known_scenes() -> tuple[list[world.Scene], list[world.Scene], list[world.Scene]]:
    """Draw known shapes: 48 as reminders, 18 to report, 18 to choose rates by. Three in
    four of the 48 have colors and grounds of the twelve, or they would be confused."""
    rng = random.Random(7)
    taught = list(product(TAUGHT_COLORS, TAUGHT_GROUNDS))
    others = [pair for pair in product(world.COLORS, world.GROUNDS) if pair not in taught]
    parts: tuple[list[world.Scene], list[world.Scene], list[world.Scene]] = ([], [], [])
    for shape in world.KNOWN_SHAPES:
        same, different = rng.sample(taught, len(taught)), rng.sample(others, len(others))
        rest = [*same[6:], *different[2:]]
        rng.shuffle(rest)
        drawn = [*same[:6], *different[:2]], rest[:3], rest[3:6]
        for part, pairs in zip(parts, drawn, strict=True):
            part += [world.draw_centered(rng, shape, color, ground) for color, ground in pairs]
    for part in parts:
        rng.shuffle(part)
    return parts


def write_images(
    folder: Path, scenes: Sequence[world.Scene], images: Sequence[Image.Image], repeats: int = 1
) -> None:
    """Write images with their captions next to them, each to be seen `repeats` times per epoch."""
    folder.mkdir(parents=True)
    if repeats > 1:
        names = (f"{number:02d}.png" for number in range(len(images)))
        lines = [json.dumps({"file_name": name, "repeats": repeats}) for name in names]
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number, (scene, image) in enumerate(zip(scenes, images, strict=True)):
        image.save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(scene.caption + "\n", encoding="utf-8")


def load_pipeline(folder: Path) -> Any:
    """Load the stock pipeline in a folder, in fp32."""
    process.silence_progress_bars()
    return get_family("qwen-image").load_pipeline(folder, torch_dtype=torch.float32)


def sample_images(
    pipeline: Any, captions: Sequence[str], first_seed: int, guidance: float = GUIDANCE
) -> list[Image.Image]:
    """Sample one image per caption, each from its own seed. Captions of one length need no mask."""
    images: list[Image.Image] = []
    for start in range(0, len(captions), 40):
        part = list(captions[start : start + 40])
        seeds = range(first_seed + start, first_seed + start + len(part))
        images += pipeline(
            prompt=part,
            negative_prompt=[" "] * len(part),
            true_cfg_scale=guidance,
            num_inference_steps=20,
            width=world.SIZE_PX,
            height=world.SIZE_PX,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
    return images


def show_to_vae(pipeline: Any, images: Sequence[Image.Image]) -> list[Image.Image]:
    """Pass images through the VAE: the best that the model can show."""
    pixels = pipeline.image_processor.preprocess(list(images))
    with torch.no_grad():
        latents = pipeline.vae.encode(pixels[:, :, None]).latent_dist.mode()
        decoded = pipeline.vae.decode(latents).sample[:, :, 0]
    return pipeline.image_processor.postprocess(decoded)  # type: ignore[no-any-return]


def score_images(scenes: Sequence[world.Scene], images: Sequence[Image.Image]) -> list[float]:
    """Score images made from the captions of scenes."""
    return [
        world.score_image(image, scene.shape, scene.color, scene.ground)
        for scene, image in zip(scenes, images, strict=True)
    ]


def judge_lesson(model: Path, result: Path) -> ConceptFidelity:
    """Judge the reported prompts with and without the adapter in the folder `result`. Writes
    `concept.json` and the picture `concept.png` into that folder."""
    new, others = unseen_scenes()[::2], known_scenes()[1]
    scenes = [*new, *others]
    captions = [scene.caption for scene in scenes]
    pipeline = load_pipeline(model)
    drawn = show_to_vae(pipeline, [scene.draw() for scene in scenes])
    before = sample_images(pipeline, captions, REPORTED_SEED)
    pipeline.load_lora_weights(result)
    after = sample_images(pipeline, captions, REPORTED_SEED)
    first, second, best = (score_images(scenes, images) for images in (before, after, drawn))

    def share(scores: list[float], part: slice) -> float:
        return round(sum(scores[part]) / sum(best[part]), 3)

    parts = slice(len(new)), slice(len(new), None)
    shares = (share(scores, part) for part in parts for scores in (first, second))
    fidelity = ConceptFidelity(*shares)
    prompts = [
        {"prompt": caption, "before": round(b, 3), "after": round(a, 3), "through_vae": round(v, 3)}
        for caption, b, a, v in zip(captions, first, second, best, strict=True)
    ]
    found = {"concept_fidelity": asdict(fidelity), "prompts": prompts}
    files.write_text_atomic(result / "concept.json", json.dumps(found, indent=1) + "\n")
    shown = [0, 4, 7, 11, len(new), len(new) + 5]
    rows = [(captions[number], before[number], after[number]) for number in shown]
    with files.atomic_write(result / "concept.png") as part:
        draw_picture([scene.draw() for scene in taught_scenes()], rows).save(part, format="PNG")
    return fidelity


# The pretrained Qwen-Image pipeline; its README.md says what it can do.
SMALL_WORLD = Path(__file__).with_name("small_world")


@dataclass(frozen=True)
class Demo:
    """The demo's material, and the options of `autotune plan` for it."""

    model: Path
    images: Path
    new_shape: str = NEW_SHAPE
    plan_options: tuple[str, ...] = PLAN_OPTIONS


def make_demo(output: Path) -> Demo:
    """Write below `output` a small Qwen-Image, twelve pictures of a new shape, and reminders."""
    if output.exists() and any(output.iterdir()):
        what = f"the folder {output} is not empty"
        raise InvalidInput(what, hint="choose another with --output, or remove it")
    model, images = output / "model", output / "images"
    shutil.copytree(SMALL_WORLD, model)
    taught, (known, *_) = taught_scenes(), known_scenes()
    write_images(images, taught, [scene.draw() for scene in taught], repeats=TAUGHT_REPEATS)
    captions = [scene.caption for scene in known]
    drawn = sample_images(load_pipeline(model), captions, first_seed=0, guidance=OWN_GUIDANCE)
    write_images(images / "known", known, drawn)
    return Demo(model, images)
