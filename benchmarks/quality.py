"""Does a setting change what is learned? python benchmarks/quality.py RESULT.jsonl [--seeds 5]
[--steps 200] [--setting NAME ...]

Teaches the demo's shape under each weight format, precision, attention backend, checkpointing and
micro-batch (the same effective batch), on the same seeds, noise and order of images as the
reference: fp32, unquantized, micro-batch 8. The adapter is then judged on the plain model, so what
is compared is what was learned. Runs in the file are not repeated.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).with_name("world")))
from eight_bits import OUTLIERS, exact_product, rotation_of_world, with_outliers
from teach import CPU, Classroom, Job

from autotune.demo.lesson import known_scenes, unseen_scenes
from autotune.knobs import quantized_layers
from autotune.plan.candidate import Candidate
from autotune.train.model import QualityMissed
from autotune.train.step import Noising, to_device

REFERENCE = Candidate(micro_batch_size=8, checkpointed_blocks=0, precision="fp32")
SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {},
    "micro-batch 4": {"micro_batch_size": 4},
    "micro-batch 1": {"micro_batch_size": 1},
    "checkpointing": {"checkpointed_blocks": 4},
    "attention kept": {"selective_blocks": 4},
    "norm and rope fused": {"norm_rope": "fused"},
    "attention _native_math": {"attention": "_native_math"},
    "attention _native_flash": {"attention": "_native_flash"},
    "bf16": {"precision": "bf16"},
    "torchao-int8": {"quantization": "torchao-int8"},
    "torchao-fp8": {"quantization": "torchao-fp8"},
    "bnb-nf4": {"quantization": "bnb-nf4"},
    "int8-rotated": {"quantization": "int8-rotated"},
    "int8-rotated, outliers": {"quantization": "int8-rotated"},
    "fp8-matmul": {"quantization": "fp8-matmul"},
}
MEASURES = ("new", "known", "loss")
MARGIN = 0.05


@torch.no_grad()
def held_out_loss(room: Classroom, transformer: torch.nn.Module, seed: int) -> float:
    """On drawn pictures of combinations that were not taught."""
    scenes = unseen_scenes()
    images = room.encode(scenes, [scene.draw() for scene in scenes])
    batch = to_device(
        {name: torch.stack([one[name] for one in images]) for name in images[0]}, CPU, torch.float32
    )
    noising = Noising(1000 + seed, 1.0)
    return float(
        np.mean(
            [float(noising.loss(room.family, transformer, batch, step, 0)) for step in range(4)]
        )
    )


def run(room: Classroom, name: str, seed: int, steps: int) -> dict[str, object]:
    begin = time.process_time()
    layers: Any = quantized_layers
    usual = layers.multiply_in_int8
    if name.endswith("outliers"):
        layers.multiply_in_int8 = with_outliers(usual, *OUTLIERS["4 of 26"])
    transformer = room.teach(Job(steps=steps), REFERENCE.changed(**SETTINGS[name]), seed)
    layers.multiply_in_int8 = usual
    prompts = 9000 + 100 * seed  # every seed samples from other noise
    found = {
        "new": room.fidelity(transformer, unseen_scenes()[1::2], prompts),
        "known": room.fidelity(transformer, known_scenes()[2], prompts),
        "loss": held_out_loss(room, transformer, seed),
    }
    return {
        "setting": name,
        "seed": seed,
        "steps": steps,
        "cpu_s": round(time.process_time() - begin, 1),
    } | found


def summarize(rows: list[dict]) -> str:
    """Mean of each measure, and its paired difference from the reference with a 95% interval."""
    by = {(row["setting"], row["seed"]): row for row in rows}
    lines = [
        "| setting | n | heart | difference | others | difference | held-out loss | difference | "
        "within 0.05 |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name in SETTINGS:
        seeds = [seed for setting, seed in by if setting == name and ("reference", seed) in by]
        if not seeds:
            continue
        cells, inside = [name, str(len(seeds))], []
        for measure in MEASURES:
            values = np.array([by[name, seed][measure] for seed in seeds])
            paired = values - np.array([by["reference", seed][measure] for seed in seeds])
            cells.append(f"{values.mean():.3f}")
            if name == "reference" or len(seeds) < 2:
                cells.append("")
                continue
            half = stats.t.ppf(0.975, len(seeds) - 1) * paired.std(ddof=1) / len(seeds) ** 0.5
            cells.append(f"{paired.mean():+.3f} ± {half:.3f}")
            inside.append(abs(paired.mean()) + half <= MARGIN)
        cells.append("" if not inside else "yes" if all(inside) else "not shown")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(result: Path, seeds: int, steps: int, settings: list[str]) -> None:
    torch.set_num_threads(1)
    library: Any = torch
    library._int_mm = exact_product
    rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    done = {(row["setting"], row["seed"]) for row in rows}
    layers: Any = quantized_layers
    # Layers of this model are 120 wide, and the CPU's products take them.
    layers.SIDE_MULTIPLE, layers.hadamard = 8, rotation_of_world
    room = Classroom()
    for seed in range(seeds):
        for name in settings:
            if (name, seed) in done:
                continue
            try:
                rows.append(run(room, name, seed, steps))
            except QualityMissed as error:
                print(f"{name}: refused by the quality floor: {error}", flush=True)
                continue
            with result.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(summarize(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--setting", action="append", choices=SETTINGS)
    asked = parser.parse_args()
    main(asked.result, asked.seeds, asked.steps, asked.setting or list(SETTINGS))
