"""Does preserving the prior keep what the model knew? python benchmarks/preserve_prior.py
RESULT.jsonl [--seeds 5] [--setting NAME ...]

Teaches the demo's shape with the twelve pictures alone, without the reminders that the demo adds:
so people train, and so they lose other shapes. With a fifth of the images preserving the prior a
run takes a quarter more steps, and sees the twelve as often. The judge then scores hearts and the
shapes that the model knew, in combinations that no caption had. Runs in the file are not repeated.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).with_name("world")))
from teach import Classroom, Job

from autotune.demo.lesson import known_scenes, unseen_scenes

CAPTIONS = tuple(scene.caption for scene in known_scenes()[0])
SETTINGS = {
    "plain": Job(own=0, steps=100),
    "plain, fewer steps": Job(own=0, steps=75),
    "plain, fewest steps": Job(own=0, steps=60),
    "preserved": Job(own=0, steps=125, preserve=0.2, prior=CAPTIONS),
    "preserved, longer": Job(own=0, steps=175, preserve=0.2, prior=CAPTIONS),
    "preserved, empty caption": Job(own=0, steps=125, preserve=0.2, prior=("",)),
}


def run(room: Classroom, name: str, seed: int) -> dict[str, object]:
    begin, prompts = time.process_time(), 9000 + 100 * seed
    transformer = None if name == "base" else room.teach(SETTINGS[name], seed=seed)
    return {
        "setting": name,
        "seed": seed,
        "new": round(room.fidelity(transformer, unseen_scenes()[1::2], prompts), 4),
        "known": round(room.fidelity(transformer, known_scenes()[2], prompts), 4),
        "cpu_s": round(time.process_time() - begin, 1),
    }


def summarize(rows: list[dict]) -> str:
    """Means with standard deviations over seeds, and what of the known shapes each has lost."""
    lines = ["| setting | seeds | heart | others | others lost |", "|---|---|---|---|---|"]
    before = {row["seed"]: row["known"] for row in rows if row["setting"] == "base"}
    for name in ("base", *SETTINGS):
        own = [row for row in rows if row["setting"] == name and row["seed"] in before]
        if own:
            new, known = (np.array([row[key] for row in own]) for key in ("new", "known"))
            lost = np.mean([before[row["seed"]] for row in own]) - known.mean()
            cells = (f"{each.mean():.3f} ± {each.std(ddof=1):.3f}" for each in (new, known))
            lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} | {lost:.3f} |")
    return "\n".join(lines)


def main(result: Path, seeds: list[int], settings: list[str]) -> None:
    torch.set_num_threads(1)
    room = Classroom()
    for seed in seeds:
        for name in settings:
            rows = _read(result)
            if any((row["setting"], row["seed"]) == (name, seed) for row in rows):
                continue
            row = run(room, name, seed)
            with result.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    print(summarize(_read(result)))


def _read(result: Path) -> list[dict]:
    return [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--setting", action="append", choices=["base", *SETTINGS])
    asked = parser.parse_args()
    main(asked.result, list(range(asked.seeds)), asked.setting or ["base", *SETTINGS])
