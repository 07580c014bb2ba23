"""Complete tables of real trials: every configuration of a restricted space, for benchmarks of the search.

    python benchmarks/tables.py [NAME ...]      writes benchmarks/results/tables/NAME.jsonl

Mid-size models of every family with random weights, through the runner that `autotune plan` uses. The faster third runs
again and keeps the quieter measurement: other work on the machine comes and goes, and the optimum should not be luck.
First line: machine, workload and transformer; then one trial per line.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.runtime.quiet import silence_libraries

silence_libraries()

import torch
from configs import MID
from cpu_truth import open_blocks

from autotune.families.base import Family
from autotune.families.registry import FAMILIES
from autotune.families.resolve import resolve_model
from autotune.hardware.store import cached_profile
from autotune.knobs.base import TuningContext
from autotune.knobs.registry import reload_key
from autotune.runtime.files import write_text_atomic
from autotune.schema.candidate import Candidate
from autotune.schema.hardware import HardwareProfile
from autotune.schema.trial import TrialResult
from autotune.schema.workload import Bucket, Workload
from autotune.search.space import build_search_space
from autotune.trials.runner import ProcessTrialRunner

FOLDER = Path(__file__).parent / "results" / "tables"
TEXT_TOKENS = 32


@dataclass(frozen=True)
class Table:
    """A question whose every answer is measured."""

    family: str
    side_px: int
    batch: int
    keep: Mapping[str, tuple[Any, ...]]
    """Values by knob; all values of the others."""


PLAIN = {"quantization": ("none", "torchao-int8"), "attention": ("native", "_native_math")}
TABLES = {
    "qwen-image-112": Table("qwen-image", 112, 4, {**PLAIN, "checkpointed_blocks": (0, 1, 2, 4, 5)}),
    "flux1-dev-80": Table("flux1-dev", 80, 4, {**PLAIN, "checkpointed_blocks": (0, 2, 4, 6, 7)}),
    "kandinsky5-image-96": Table(
        "kandinsky5-image-lite", 96, 4, {**PLAIN, "checkpointed_blocks": (0, 1, 3, 4, 5)}
    ),
    "kandinsky5-video-64": Table("kandinsky5-video-lite", 64, 4, {**PLAIN, "checkpointed_blocks": (0, 1, 3, 4, 5)}),
    "qwen-image-edit-64": Table("qwen-image-edit", 64, 4, {**PLAIN, "checkpointed_blocks": (0, 1, 2, 4, 5)}),
    "flux1-dev-128-fp8": Table(
        "flux1-dev", 128, 2, {"checkpointed_blocks": (0, 3, 7)}
    ),
    "kandinsky5-image-64": Table("kandinsky5-image-lite", 64, 8, {**PLAIN, "checkpointed_blocks": (0, 1, 3, 5)}),
}  # fmt: skip


def write_model(folder: Path, family: Family, config: Mapping[str, Any]) -> None:
    """The family's small pipeline with a mid-size transformer of random weights in its place."""
    family.write_small_pipeline(folder, ["a red circle"], seed=0)
    torch.manual_seed(0)
    transformer: Any = family.build_transformer(config)
    open_blocks(transformer)
    transformer.save_pretrained(folder / "transformer")


def workload_of(folder: Path, table: Table) -> Workload:
    spec, family = resolve_model(str(folder)).spec, FAMILIES[table.family]
    frames = 5 if family.can_train_clips else 1
    return Workload(
        model=spec.model_copy(update={"name": f"{table.family} mid-size"}),
        resolution_px=table.side_px,
        buckets=(Bucket(width_px=table.side_px, height_px=table.side_px, num_frames=frames, num_items=20),),
        max_text_tokens=TEXT_TOKENS,
        text_padding="exact",
        num_control_images=min(1, family.max_controls),
        rank=8,
        lora_alpha=8.0,
        targets="attention",
        effective_batch_size=table.batch,
    )


def configurations(table: Table, hardware: HardwareProfile, workload: Workload) -> list[Candidate]:
    """Those kept of the search space, those that share a loaded model side by side."""
    space = build_search_space(TuningContext(hardware, FAMILIES[table.family], workload))
    others = [knob for knob in table.keep if knob != "checkpointed_blocks"]
    bases = [c for c in space.candidates if all(getattr(c, knob) in table.keep[knob] for knob in others)]
    kept = [base.changed(checkpointed_blocks=k) for base in bases for k in table.keep["checkpointed_blocks"]]
    return sorted(kept, key=lambda candidate: [str(value) for value in reload_key(candidate)])


def quieter(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Each configuration's measurement with the shorter median."""
    best: dict[Candidate, TrialResult] = {}
    for trial in trials:
        known = best.setdefault(trial.candidate, trial)
        if known.outcome == trial.outcome == "ok":
            best[trial.candidate] = min(known, trial, key=lambda t: t.median_step_seconds or 0.0)
    return list(best.values())


def measure(name: str, table: Table, hardware: HardwareProfile) -> None:
    family = FAMILIES[table.family]
    config = MID[table.family]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, family, config)
        workload = workload_of(folder, table)
        candidates = configurations(table, hardware, workload)
        trials: list[TrialResult] = []
        with ProcessTrialRunner(hardware, str(folder), workload) as runner:
            for candidate in candidates:
                trials.append(runner.run(candidate))
                print(name, trials[-1].median_step_seconds, candidate.label(), trials[-1].message, flush=True)
            ran = sorted((t for t in trials if t.outcome == "ok"), key=lambda t: t.median_step_seconds or 0.0)
            faster = {trial.candidate for trial in ran[: len(ran) // 3]}
            trials += [runner.run(candidate) for candidate in reversed(candidates) if candidate in faster]
    head = {
        "hardware": hardware.model_dump(mode="json"),
        "workload": workload.model_dump(mode="json"),
        "family": family.name,
        "config": config,
    }
    lines = [json.dumps(head), *(t.model_dump_json(exclude_defaults=True) for t in quieter(trials))]
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_text_atomic(FOLDER / f"{name}.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    machine = cached_profile()
    for chosen in sys.argv[1:] or TABLES:
        measure(chosen, TABLES[chosen], machine)
