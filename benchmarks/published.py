"""Predictions against what other trainers publish: a check of sanity, for they are other programs.

    python benchmarks/published.py [--csv ../shared/data/published_numbers.csv]

Rows are chosen by these rules; the first that a row breaks is the reason printed. Rules 1 to 8 were fixed before any
error was looked at. Rule 9, reading "fp8-torchao" by its source in rule 5, and the data loader's shape in rule 3 came
after: `benchmarks/LOG.md` tells why.

1. The model is one of our families.
2. It is a measurement (`evidence` measured_*), with status ok and a number, or an OOM.
3. Resolution, batch and rank are stated, and the resolution is one. Where the notes call the stated shape suspect and
   name the example's data loader as the one that fits, the loader's shape counts (frames cut to what the VAE takes).
4. The GPU is stated and in our catalogue.
5. The base is bf16, or stored as one of our quantisations stores it. SimpleTuner's "fp8-torchao" and the "fp8 torchao
   (training)" of diffusers' example are not: `convert_to_float8_training` multiplies in float8 and keeps casts of
   weights and inputs for the backward pass.
6. Checkpointing is `none` or full, per block.
7. Nothing is offloaded or swapped, and nothing is compiled.
8. The figure's kind is known: as the allocator counts (allocated, or SimpleTuner's "peak VRAM": it differs between
   GPUs by their library workspaces, which only allocated bytes show) or the whole process.
9. Something is checkpointed, or the program computes in bf16 alone. Trainers that accelerate prepares run under
   autocast: layer norms keep an fp32 copy of their input, and each adapter its own cast of what its neighbours share.
   Checkpointing drops both, so only rows without it are left out.

Readings that agree in all of model, trainer, shape, rank, storage, checkpointing and value (to 1%) are one reading.
"""

import argparse
import csv
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from autotune.quiet import silence_libraries

silence_libraries()

from autotune.cost.predict import Predictor
from autotune.families.resolve import resolve_model
from autotune.hardware.catalogue import catalogue, profile_of_gpu
from autotune.prediction import Prediction
from autotune.schema import Bucket, Candidate, HardwareProfile, Workload

FAMILIES = {
    "Qwen-Image (20B)": "qwen-image",
    "Qwen-Image-Edit": "qwen-image-edit",
    "Qwen-Image-Edit (20B)": "qwen-image-edit",
    "Qwen-Image-Edit-2509": "qwen-image-edit-plus",
    "FLUX.1-dev (12B)": "flux1-dev",
    "Kandinsky5 Video Lite 2B T2V": "kandinsky5-video-lite",
}
GPUS = {
    "H100 80GB": "nvidia-h100-sxm",
    "H100 SXM": "nvidia-h100-sxm",
    "L40S 48GB": "nvidia-l40s",
    "B200": "nvidia-b200",
    "RTX 5090": "nvidia-rtx-5090",
    "RTX 4090": "nvidia-rtx-4090",
    "RTX 4090 24GB": "nvidia-rtx-4090",
    "RTX A6000": "nvidia-rtx-a6000",
    "RTX A6000 48GB": "nvidia-rtx-a6000",
    "A100 80GB": "nvidia-a100-80gb",
}
STORAGE = {
    "bf16": "none",
    "none (bf16)": "none",
    "full_bf16": "none",
    "fp8wo-torchao": "torchao-fp8",
    "int8-torchao": "torchao-int8",
    "nf4": "bnb-nf4",
    "nf4 (QLoRA)": "bnb-nf4",
}
CHECKPOINTING = {"none": False, "full per-block (torch)": True, "full": True, "full (default)": True}
UNDER_AUTOCAST = ("SimpleTuner", "diffusers")
ALLOCATED = ("peak allocated", 'peak (doc: "peak VRAM GiB")')
WHOLE = ("peak nvidia-smi", "peak", "peak, training only", "peak reserved, first epoch", "user reading")
Row = dict[str, str]


def broken_rule(row: Row) -> str | None:  # noqa: PLR0911 - one return for each rule
    """The first rule that `row` breaks."""
    if row["model"] not in FAMILIES:
        return "1 not our model"
    numbers = row["vram_value"] or row["s_per_it"]
    if not row["evidence"].startswith("measured") or not (
        row["status"] == "OOM" or (row["status"] == "ok" and numbers)
    ):
        return "2 no measurement"
    if resolution_of(row) is None or not row["batch"] or not row["rank"].isdigit():
        return "3 shape unknown"
    if row["gpu"] not in GPUS:
        return "4 GPU unknown"
    if row["base_quant"] not in STORAGE:
        return "5 other storage"
    if row["grad_ckpt"] not in CHECKPOINTING:
        return "6 other checkpointing"
    if row["offload_or_swap"] not in ("", "none") or row["compile"] not in ("", "none"):
        return "7 offloaded or compiled"
    if row["vram_value"] and row["vram_kind"] not in (*ALLOCATED, *WHOLE):
        return "8 kind unknown"
    if not CHECKPOINTING[row["grad_ckpt"]] and row["trainer"].startswith(UNDER_AUTOCAST):
        return "9 keeps autocast's copies"
    return None


def resolution_of(row: Row) -> tuple[int, int] | None:
    """Width and height in pixels."""
    loader = re.search(r"(\d+) px-area \(example dataloader\)", row["resolution"])
    if loader and "only fits the latter" in row["notes"]:
        return int(loader[1]), int(loader[1])
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", row["resolution"])
    return (int(match[1]), int(match[2] or match[1])) if match and "SUSPECT" not in row["notes"] else None


def frames_of(row: Row) -> int:
    """Frames of a clip; 1 for an image."""
    match = re.search(r"(\d+)(?: \(example dataloader\))?$", row["frames"])
    return (int(match[1]) - 1) // 4 * 4 + 1 if match else 1


def predicted(row: Row) -> tuple[Prediction, HardwareProfile]:
    """Our prediction for a row that breaks no rule."""
    model = resolve_model(FAMILIES[row["model"]])
    width, height = resolution_of(row) or (0, 0)
    batch = int(row["batch"])
    hardware = profile_of_gpu(next(gpu for gpu in catalogue() if gpu.id == GPUS[row["gpu"]]))
    workload = Workload(
        model=model.spec,
        resolution_px=round((width * height) ** 0.5),
        buckets=(Bucket(width_px=width, height_px=height, num_frames=frames_of(row), num_items=1),),
        max_text_tokens=model.family.defaults.text_tokens,
        text_padding="exact",
        rank=int(row["rank"]),
        lora_alpha=float(row["rank"]),
        targets="attention",
        effective_batch_size=batch * int(row["grad_accum"] or 1),
    )
    candidate = Candidate(
        micro_batch_size=batch,
        checkpointed_blocks=model.spec.num_blocks if CHECKPOINTING[row["grad_ckpt"]] else 0,
        quantization=STORAGE[row["base_quant"]],
    )
    return Predictor(hardware, workload, model.family, model.config).predict(candidate), hardware


def unique(rows: Iterable[Row]) -> list[Row]:
    """One row for each reading."""
    seen: dict[tuple[str, ...], Row] = {}
    for row in rows:
        fields = ("model", "trainer", "resolution", "batch", "rank", "base_quant", "grad_ckpt")
        value = row["vram_value"]
        size = f"{float(value):.1f}" if value and float(value) < 30 else f"{float(value):.0f}" if value else row["gpu"]
        seen.setdefault((*(row[field] for field in fields), size, row["s_per_it"]), row)
    return list(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / ".." / "shared" / "data" / "published_numbers.csv"
    parser.add_argument("--csv", type=Path, default=default)
    rows = list(csv.DictReader(parser.parse_args().csv.open(encoding="utf-8")))
    reasons = {row["id"]: broken_rule(row) for row in rows}
    print(f"{len(rows)} rows; dropped:")
    for reason, count in sorted(Counter(reason for reason in reasons.values() if reason).items()):
        print(f"  {reason:28}{count}")
    chosen = unique(row for row in rows if reasons[row["id"]] is None)
    print(f"{len(chosen)} readings of {sum(reason is None for reason in reasons.values())} rows remain\n")
    errors: dict[str, list[float]] = defaultdict(list)
    memory_seen: set[tuple[str, ...]] = set()
    for row in chosen:
        prediction, hardware = predicted(row)
        print(compare(row, prediction, hardware, errors, memory_seen))
    print()
    for name, values in sorted(errors.items()):
        middle = statistics.median(abs(v) for v in values)
        worst = max(values, key=abs)
        print(f"{name:52} n {len(values):3}  median |error| {100 * middle:5.1f}%  worst {100 * worst:+6.1f}%")


def compare(
    row: Row,
    prediction: Prediction,
    hardware: HardwareProfile,
    errors: dict[str, list[float]],
    memory_seen: set[tuple[str, ...]],
) -> str:
    """One line; adds the errors to their groups. One memory reading counts once, whatever the GPU."""
    label = f"{row['id']:>4} {row['model'][:22]:22} {row['gpu'][:10]:10} {row['base_quant'][:12]:12}"
    label += f" {row['grad_ckpt'][:8]:8}"
    total = hardware.device.total_memory_bytes or 0
    if row["status"] == "OOM":
        share = prediction.peak_memory_bytes / total
        errors["OOM rows that we would call fitting with 10% margin"].append(float(share < 0.9))
        return f"{label} OOM; predicted {prediction.peak_memory_bytes / 2**30:.1f} of {total / 2**30:.1f} GiB"
    parts = [label]
    if row["vram_value"]:
        size = prediction.peak_memory_bytes if row["vram_kind"] in WHOLE else prediction.allocated_memory_bytes
        unit = 2**30 if row["vram_unit"] == "GiB" else 1e9
        error = size / unit / float(row["vram_value"]) - 1
        parts.append(f"memory {row['vram_value']:>6} predicted {size / unit:6.2f} {100 * error:+6.1f}%")
        key = (row["model"], row["trainer"], row["base_quant"], row["grad_ckpt"], row["resolution"])
        if key not in memory_seen:
            memory_seen.add(key)
            for group in ("all", FAMILIES[row["model"]], row["trainer"], row["vram_kind"][:20]):
                errors[f"memory, {group}"].append(error)
    if row["s_per_it"]:
        error = prediction.step_seconds / float(row["s_per_it"]) - 1
        parts.append(f"step {row['s_per_it']:>6} predicted {prediction.step_seconds:6.2f} {100 * error:+6.1f}%")
        for group in ("all", FAMILIES[row["model"]], row["trainer"], row["gpu"]):
            errors[f"time, {group}"].append(error)
    return "  ".join(parts)


if __name__ == "__main__":
    main()
