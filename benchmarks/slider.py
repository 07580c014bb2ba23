"""Does a slider turn one thing, and only that? python benchmarks/slider.py RESULT.jsonl [--seeds 5]

Plans once, and trains a slider on the small world from three prompts, without a picture: purple
toward red at strength 1, toward blue at -1. The judge then reads the color, and whether shape and
ground are right, in pictures of all shapes on three grounds, sampled by the stock pipeline at five
strengths; the prompts named one of the 18 combinations. Seeds in the file are not repeated.
"""

import argparse
import json
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autotune
from autotune.demo.lesson import SMALL_WORLD, TAUGHT_GROUNDS, load_pipeline, sample_images
from autotune.demo.world import KNOWN_SHAPES, read_image

COLORS = ("red", "blue", "purple")  # positive, negative and neutral
STRENGTHS = (-1.0, -0.5, 0.0, 0.5, 1.0)
LEARNING = {
    "targets": "attention+mlp",
    "effective_batch_size": 8,
    "num_steps": 60,
    "learning_rate": 2e-3,
    "lr_scheduler": "cosine",
    "timestep_shift": 1.0,
}


def judge(adapter: Path, seed: int) -> list[dict[str, object]]:
    """Counts of colors, and the share of right shapes and grounds, at each strength."""
    pipeline, rows = load_pipeline(SMALL_WORLD), []
    pipeline.load_lora_weights(adapter)
    (name,) = pipeline.get_list_adapters()["transformer"]
    scenes = list(product(KNOWN_SHAPES, TAUGHT_GROUNDS))
    captions = [f"a {COLORS[2]} {shape} on a {ground} background" for shape, ground in scenes]
    for strength in STRENGTHS:
        pipeline.set_adapters([name], [strength])
        colors: Counter[str] = Counter()
        kept = 0
        images = sample_images(pipeline, captions, 9000 + 100 * seed)
        for (shape, ground), image in zip(scenes, images, strict=True):
            seen = read_image(image)
            figure = max(seen.figures, key=lambda one: one.num_pixels, default=None)
            colors[figure.color if figure else "none"] += 1
            kept += figure is not None and (figure.shape, seen.ground) == (shape, ground)
        share = round(kept / len(scenes), 4)
        rows.append({"seed": seed, "strength": strength, "colors": colors, "kept": share})
    return rows


def summarize(rows: list[dict]) -> str:
    """Mean shares, with standard deviations over seeds."""
    lines = [
        "| strength | red | purple | blue | cyan | shape and ground |",
        "|---|---|---|---|---|---|",
    ]
    for strength in STRENGTHS:
        own = [row for row in rows if row["strength"] == strength]
        cells = []
        for color in ("red", "purple", "blue", "cyan"):
            shares = [row["colors"].get(color, 0) / sum(row["colors"].values()) for row in own]
            cells.append(f"{np.mean(shares):.0%} ± {np.std(shares, ddof=1):.0%}")
        kept = np.mean([row["kept"] for row in own])
        lines.append(f"| {strength:g} | {' | '.join(cells)} | {kept:.0%} |")
    return "\n".join(lines)


def main(result: Path, num_seeds: int) -> None:
    torch.set_num_threads(1)
    prompts = tuple(f"a {color} circle on a white background" for color in COLORS)
    own: dict[str, Any] = {**LEARNING, "slider": prompts, "preview_prompts": ()}
    plan = autotune.plan(str(SMALL_WORLD), resolution=64, max_trials=1, **own)
    for seed in range(num_seeds):
        if any(row["seed"] == seed for row in _read(result)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            autotune.train(plan, output=f"{folder}/slider", seed=seed)
            rows = judge(Path(folder) / "slider", seed)
        with result.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(*rows, sep="\n", flush=True)
    print(summarize(_read(result)))


def _read(result: Path) -> list[dict]:
    return [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    main(asked.result, asked.seeds)
