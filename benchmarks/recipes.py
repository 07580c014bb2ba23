"""What `plan` would choose against the settings that people copy, on this CPU: images per second,
memory, loss.

    python benchmarks/recipes.py [--output FILE] [--rounds N] [FAMILY ...]

Mid-size models of four families, the same effective batch and data for all. Time is the process's
own on one core, so that other work on the machine counts little; all settings are measured in
rounds, one after the other, and each keeps its fastest step. The recipes, in bf16 as they are
copied:

- `script`: as the README of diffusers' scripts runs them: one image at a time, accumulated, every
  block recomputed;
- `whole batch, all recomputed`: the batch at once, every block recomputed;
- `int8, all recomputed`: the same with weights stored in 8 bits.

Ours, which choose their precision, too:

- `searched`: our search;
- `searched, compact`: with products in 8 bits, too;
- `less memory`: within three fifths of the memory that `searched` took.
"""

import argparse
import json
import platform
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from autotune.system.process import silence_libraries

silence_libraries()

import torch
from configs import MID
from cost_accuracy import workload_of
from cpu_truth import Truth, run
from search_tasks import StepMemoryModel

from autotune.cost.predict import CostModel
from autotune.knobs.knob import TuningContext
from autotune.machine.probe import cached_profile
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.words import label_of
from autotune.search.next import ResidualSearch, SearchLimits
from autotune.search.space import build_search_space, expand_block_counts
from autotune.search.study import run_search

SIDE_PX = {"qwen-image": 128, "flux1-dev": 128, "z-image": 128, "wan-2.1": 64}
"""By family. The last one's are clips of five frames."""
MAX_TRIALS = 8
LESS = 0.6


class Bench:
    """One family's mid-size model: every candidate can be run."""

    def __init__(self, name: str, hardware: HardwareProfile) -> None:
        self.family, self.config, self.hardware = FAMILIES[name], MID[name], hardware
        usual, side = workload_of(name), SIDE_PX[name]
        buckets = tuple(bucket.changed(width_px=side, height_px=side) for bucket in usual.buckets)
        self.workload = usual.changed(resolution_px=side, buckets=buckets)
        self.run = cache(self._run)

    def _run(self, candidate: Candidate) -> Truth:
        return run(self.family, self.config, self.workload, candidate)

    def searched(self, budget_bytes: int, *, quality: str = "high") -> Candidate:
        """The fastest of the trials of a search."""
        workload = self.workload.changed(quality=quality)
        cost = CostModel.build(self.hardware, workload, self.family, self.config)
        context = TuningContext(self.hardware, self.family, workload)
        space = expand_block_counts(build_search_space(context), cost)
        measured: Any = StepMemoryModel(cost)
        search = ResidualSearch(space, measured, budget_bytes)

        def trial(candidate: Candidate) -> TrialResult:
            truth = self.run(candidate)
            fits = truth.peak_bytes <= budget_bytes
            return TrialResult(
                candidate=candidate,
                outcome="ok" if fits else "oom",
                step_seconds=truth.step_seconds,
                peak_memory_bytes=truth.peak_bytes,
            )

        limits = SearchLimits(max_trials=MAX_TRIALS, max_seconds=float("inf"))
        ran = [
            one
            for one in run_search(search, trial, limits, lambda result: None)
            if one.outcome == "ok"
        ]
        return min(ran, key=lambda one: one.median_step_seconds or 0.0).candidate

    def recipes(self) -> dict[str, Candidate]:
        """Every recipe's settings."""
        batch, blocks = self.workload.effective_batch_size, self.workload.model.num_blocks
        everything = self.hardware.device.budget_bytes
        script = Candidate(micro_batch_size=1, checkpointed_blocks=blocks, precision="bf16")
        whole = script.changed(micro_batch_size=batch)
        now = self.searched(everything)
        return {
            "script": script,
            "whole batch, all recomputed": whole,
            "int8, all recomputed": whole.changed(quantization="torchao-int8"),
            "searched": now,
            "searched, compact": self.searched(everything, quality="compact"),
            "less memory": self.searched(int(LESS * self.run(now).peak_bytes)),
        }


def measure(name: str, hardware: HardwareProfile, rounds: int) -> list[dict[str, Any]]:
    bench = Bench(name, hardware)
    recipes = bench.recipes()
    truths: dict[str, list[Truth]] = {recipe: [] for recipe in recipes}
    for _ in range(rounds):
        for recipe, candidate in recipes.items():
            truths[recipe].append(bench._run(candidate))
    images = bench.workload.effective_batch_size
    return [
        {
            "family": name,
            "recipe": recipe,
            "settings": label_of(recipes[recipe]),
            "images_per_second": round(images / min(min(truth.step_seconds) for truth in found), 4),
            "peak_bytes": found[0].peak_bytes,
            "loss": round(found[0].loss, 6),
        }
        for recipe, found in truths.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("families", nargs="*", default=list(SIDE_PX))
    options = parser.parse_args()
    torch.set_num_threads(1)
    hardware = cached_profile()
    today = datetime.now(UTC).date().isoformat()
    lines: list[dict[str, Any]] = [
        {
            "date": today,
            "cpu": platform.processor() or hardware.host.cpu,
            "torch": torch.__version__,
        }
    ]
    for name in options.families:
        rows = measure(name, hardware, options.rounds)
        for row in rows:
            print(
                f"{row['family']:14}{row['recipe']:36}{row['images_per_second']:8.3f}/s"
                f"{row['peak_bytes'] / 1e6:9.1f} MB  loss {row['loss']:.5f}  {row['settings']}",
                flush=True,
            )
        lines += rows
        if options.output:  # after each family: a run that is cut loses one
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
