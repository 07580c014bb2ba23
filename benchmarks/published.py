"""Predictions against what other trainers publish: a check of sanity, for they are other programs.

    python benchmarks/published.py [--csv ../shared/data/published_numbers.csv] [--fresh FILE ...]

Rows are chosen by these rules; the first that a row breaks is the reason printed. Each file is judged twice: by the
rules that were fixed before any of its errors was looked at (`first` for the published numbers, `then` for the fresh
readings), and by those of `today`, some of which came after errors had been seen (`benchmarks/LOG.md` tells why).

1. The model is one of our families.
2. It is a measurement (`evidence` measured_*), with status ok and a number, or an OOM.
3. Resolution, batch and rank are stated, the resolution is one, and the notes don't call the shape suspect.
   After errors were seen: where they do and name the example's data loader as the one that fits, the loader's shape
   counts (frames cut to what the VAE takes).
4. The GPU is stated and in our catalog.
5. The base is bf16, or stored as one of our quantizations stores it.
   After errors were seen: not what multiplies in float8, as SimpleTuner's "fp8-torchao" does (torchao's
   Float8DynamicActivationFloat8WeightConfig) and "fp8 torchao (training)" of diffusers' example
   (`convert_to_float8_training`, which also leaves the weights in bf16).
6. Checkpointing is `none` or full, per block.
7. Nothing is offloaded or swapped, and nothing is compiled.
8. The figure's kind is known: as the allocator counts (allocated, or SimpleTuner's "peak VRAM": it differs between
   GPUs by their library workspaces, which only allocated bytes show) or the whole process.
9. After errors were seen: something is checkpointed, or the program computes in bf16 alone. Trainers that accelerate
   prepares run under autocast: layer norms keep an fp32 copy of their input, and each adapter its own cast of what its
   neighbors share. Checkpointing drops both, so only rows without it are left out.
10. Text encoders and VAE are off the device while it trains, where that is known: only `data/fresh_readings.csv` says.
    After errors were seen: where they stay, the row counts, and is predicted with encoders and VAE that stay as well.

Readings that agree in all of model, trainer, shape, rank, storage, checkpointing and value (to 1%) are one reading. The
fresh readings were collected, by what `data/fresh_readings.md` had fixed, after all of these rules but those said to be
later; the second collection after all of today's.

Times are of other programs: by the datasheet each takes a factor of its own over the sum of its kernels, which is
printed last; the cost model has one for all (`STEP_OVER_KERNELS`), with the least median error.
"""

import argparse
import csv
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.runtime.quiet import silence_libraries

silence_libraries()

from autotune.cost.predict import CostModel
from autotune.cost.timing import STEP_OVER_KERNELS
from autotune.families.resolve import resolve_model
from autotune.hardware.catalog import load_catalog, profile_of_gpu
from autotune.schema.candidate import Candidate
from autotune.schema.prediction import Prediction
from autotune.schema.workload import Bucket, Workload

FAMILIES = {
    "Qwen-Image (20B)": "qwen-image",
    "Qwen-Image-Edit": "qwen-image-edit",
    "Qwen-Image-Edit (20B)": "qwen-image-edit",
    "Qwen-Image-Edit-2509": "qwen-image-edit-plus",
    "FLUX.1-dev (12B)": "flux1-dev",
    "Kandinsky5 Video Lite 2B T2V": "kandinsky5-video-lite",
    **{name: name for name in ("flux1-dev", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus")},
    **{name: name for name in ("kandinsky5-image-lite", "kandinsky5-video-lite")},
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
    **{gpu.id: gpu.id for gpu in load_catalog()},
}
IN_FLOAT8 = ("fp8-torchao", "fp8 torchao (training)")
STORAGE = {
    "bf16": "none",
    "none (bf16)": "none",
    "full_bf16": "none",
    "fp8wo-torchao": "torchao-fp8",
    **dict.fromkeys(IN_FLOAT8, "torchao-fp8"),
    "int8-torchao": "torchao-int8",
    "nf4": "bnb-nf4",
    "nf4 (QLoRA)": "bnb-nf4",
    **{name: name for name in ("none", "bnb-nf4", "torchao-int8", "torchao-fp8", "layerwise-fp8")},
}
CHECKPOINTING = {"none": False, "full per-block (torch)": True, "full": True, "full (default)": True}
UNDER_AUTOCAST = ("SimpleTuner", "diffusers", "sd-scripts", "musubi-tuner", "flymyai-lora-trainer", "x-flux")
ALLOCATED = ("peak allocated", 'peak (doc: "peak VRAM GiB")')
WHOLE = ("peak nvidia-smi", "peak", "peak, training only", "peak reserved, first epoch", "user reading")
MARGIN = 0.1
"""Of the card: what a plan leaves free."""
LARGE = 0.08
"""The target for the median; a larger miss is explained in `MISSES`."""
MISSES = {
    "324": "runs under autocast: with its copies and captions of 1,024 tokens about 79 GiB by hand",
    "340": "seems to keep bf16 copies of weights for the backward pass (its Chroma takes 19 GiB more than in bf16): "
    "84 GiB by hand; runs under autocast besides",
    "342": "unknown; scales and multiplies in float8, which our storage doesn't",
    "343": "unknown; scales and multiplies in float8, which our storage doesn't",
    "621": "memory: float8 training keeps the weights in bf16 (23.8 GB), its command keeps encoders and VAE (9.9 GB): "
    "about 36 GB by hand; time: 20 minutes of everything over 700 steps",
    "F1": "time: another program takes 1.6 times as long by image and token, on the same card (F6)",
    "F4": "time: another program takes 1.6 times as long by image and token, on the same card (F7)",
    "F5": "time: likely a slip of the document, which has 1.4 seconds per step for the same elsewhere (F6)",
    "F14": "memory: likely the peak of encoding captions before (T5, CLIP and VAE: 10.5 GB predicted), for the same "
    "program's bf16 figure leaves 0.9 GB for training; time: bound by the host, whose launches nobody measured",
    "F39": "the program keeps the whole pipeline on the device (read in its code)",
    "F40": "memory: a card of 80 has GiB, and 24 of them are +8.8%; its Adam has 8 bits (+7.9%); 24 has two digits "
    "(24.49: +5.7%); the rest unknown",
    "F58": "memory: must be GiB (+3.1%), for weights, checkpoints and CUDA context alone are 44 GB; time: 1,536 text "
    "tokens are assumed, its pictures make about 700 (+20%); the rest is its program's factor",
}
"""What investigations found, by the row's id."""
WHOLE_PIPELINE = {
    "residency": "keep",
    "text_encoder_device": "training",
    "text_encoder_quantization": "none",
    "text_encoder_streamed": "false",
}
FOUND_RESIDENT = ("F39",)
"""Rows that don't say whether the other models stay on the device; the program's code does."""

Row = dict[str, str]


@dataclass(frozen=True)
class Rule:
    """A reason to leave a row out, and which of the two sets of rules have it."""

    reason: str
    broken: Callable[[Row], bool]
    sets: tuple[str, ...] = ("first", "then", "today")


def no_measurement(row: Row) -> bool:
    numbers = row["vram_value"] or row["s_per_it"]
    return not (
        row["evidence"].startswith("measured") and (row["status"] == "OOM" or (row["status"] == "ok" and numbers))
    )


def shape_unknown(row: Row) -> bool:
    return resolution_of(row) is None or not row["batch"] or not row["rank"].isdigit()


def keeps_casts(row: Row) -> bool:
    return not CHECKPOINTING[row["grad_ckpt"]] and row["trainer"].startswith(UNDER_AUTOCAST)


NOTHING = ("", "none")
RULES = (
    Rule("1 not our model", lambda row: row["model"] not in FAMILIES),
    Rule("2 no measurement", no_measurement),
    Rule("3 shape unknown", shape_unknown),
    Rule("3 shape called suspect", lambda row: "SUSPECT" in row["notes"], ("first",)),
    Rule("4 GPU unknown", lambda row: row["gpu"] not in GPUS),
    Rule("5 other storage", lambda row: row["base_quant"] not in STORAGE),
    Rule("5 multiplies in float8", lambda row: row["base_quant"] in IN_FLOAT8, ("then", "today")),
    Rule("6 other checkpointing", lambda row: row["grad_ckpt"] not in CHECKPOINTING),
    Rule("7 offloaded or compiled", lambda row: row["offload_or_swap"] not in NOTHING or row["compile"] not in NOTHING),
    Rule("8 kind unknown", lambda row: bool(row["vram_value"]) and row["vram_kind"] not in (*ALLOCATED, *WHOLE)),
    Rule("9 keeps autocast's copies", keeps_casts, ("then", "today")),
    Rule("10 other models resident", lambda row: row.get("other_models") == "resident", ("first", "then")),
)


def broken_rule(row: Row, rules: str) -> str | None:
    """The first rule that `row` breaks of the set `rules`."""
    return next((rule.reason for rule in RULES if rules in rule.sets and rule.broken(row)), None)


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


def predicted(row: Row, rules: str) -> "Reading":
    """Our prediction for a row that breaks no rule of the set `rules`."""
    model = resolve_model(FAMILIES[row["model"]])
    width, height = resolution_of(row) or (0, 0)
    batch = int(row["batch"])
    hardware = profile_of_gpu(next(gpu for gpu in load_catalog() if gpu.id == GPUS[row["gpu"]]))
    workload = Workload(
        model=model.spec,
        resolution_px=round((width * height) ** 0.5),
        buckets=(Bucket(width_px=width, height_px=height, num_frames=frames_of(row), num_items=1),),
        max_text_tokens=int(row.get("text_tokens") or model.family.defaults.text_tokens),
        text_padding="exact",
        num_control_images=1 if "edit" in FAMILIES[row["model"]] else 0,
        rank=int(row["rank"]),
        lora_alpha=float(row["rank"]),
        targets=row.get("targets") or "attention",
        effective_batch_size=batch * int(row["grad_accum"] or 1),
    )
    candidate = Candidate(
        micro_batch_size=batch,
        checkpointed_blocks=model.spec.num_blocks if CHECKPOINTING[row["grad_ckpt"]] else 0,
        quantization=STORAGE[row["base_quant"]],
    )
    stay = rules == "today" and (row.get("other_models") == "resident" or row["id"] in FOUND_RESIDENT)
    pins = WHOLE_PIPELINE if stay else None
    cost = CostModel.build(hardware, workload, model.family, model.config, caching_pins=pins)
    return Reading(row, cost.predict(candidate), cost.resident_encoder_bytes, hardware.device.total_memory_bytes or 0)


@dataclass(frozen=True)
class Reading:
    """A row with what we predict for it."""

    row: Row
    prediction: Prediction
    resident_encoder_bytes: int
    """Of models that stay on the device beside training."""
    total_bytes: int
    """Of the device."""

    @property
    def memory_predicted(self) -> float:
        """In the row's unit, of the row's kind."""
        whole = self.row["vram_kind"] in WHOLE
        size = self.prediction.peak_memory_bytes if whole else self.prediction.allocated_memory_bytes
        return (size + self.resident_encoder_bytes) / (2**30 if self.row["vram_unit"] == "GiB" else 1e9)

    @property
    def memory_error(self) -> float | None:
        value = self.row["vram_value"]
        return self.memory_predicted / float(value.lstrip("~")) - 1 if value else None

    @property
    def time_error(self) -> float | None:
        value = self.row["s_per_it"]
        return self.prediction.step_seconds / float(value) - 1 if value else None

    @property
    def over_kernels(self) -> float | None:
        """The published step, by the sum of its kernels and launches by the datasheet."""
        launching = self.prediction.step_time.overhead_seconds + self.prediction.step_time.transfer_seconds
        kernels = (self.prediction.step_seconds - launching) / STEP_OVER_KERNELS
        value = self.row["s_per_it"]
        return float(value) / (kernels + launching) if value else None

    @property
    def left_free(self) -> float:
        """Share of the card."""
        return 1 - (self.prediction.peak_memory_bytes + self.resident_encoder_bytes) / self.total_bytes

    def line(self) -> str:
        row = self.row
        text = f"{row['id']:>4} {row['model'][:21]:21} {row['gpu'].removeprefix('nvidia-')[:9]:9} "
        text += f"{row['base_quant'][:13]:13} {row['grad_ckpt'][:4]:4}"
        if row["status"] == "OOM":
            sizes = f"{(1 - self.left_free) * self.total_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB"
            return f"{text}  OOM, predicted {sizes}, {100 * self.left_free:+.0f}% left free"
        if self.memory_error is not None:
            text += f"  memory {row['vram_value']:>6} predicted {self.memory_predicted:6.2f}"
            text += f" {100 * self.memory_error:+6.1f}%"
        if self.time_error is not None:
            seconds = self.prediction.step_seconds
            text += f"  step {row['s_per_it']:>6} predicted {seconds:6.2f} {100 * self.time_error:+6.1f}%"
        return text

    @property
    def memory_missed(self) -> bool:
        """Whether memory wants a word: a large error, or an OOM that we would call fitting."""
        if self.row["status"] == "OOM":
            return self.left_free > MARGIN
        return abs(self.memory_error or 0.0) > LARGE

    @property
    def missed(self) -> bool:
        """Whether anything wants a word."""
        return self.memory_missed or abs(self.time_error or 0.0) > LARGE

    @property
    def explanation(self) -> str:
        """Of a miss."""
        own_factor = "time: its program has another factor, see below"
        return MISSES.get(self.row["id"], "unknown" if self.memory_missed else own_factor)


def unique(rows: Iterable[Row]) -> list[Row]:
    """One row for each reading."""
    seen: dict[tuple[str, ...], Row] = {}
    for row in rows:
        fields = ("model", "trainer", "resolution", "batch", "rank", "base_quant", "grad_ckpt")
        value = row["vram_value"].lstrip("~")
        size = f"{float(value):.1f}" if value and float(value) < 30 else f"{float(value):.0f}" if value else row["gpu"]
        seen.setdefault((*(row[field] for field in fields), size, row["s_per_it"]), row)
    return list(seen.values())


def errors_of(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Errors by group. One memory reading counts once, whatever the GPU."""
    errors: dict[str, list[float]] = defaultdict(list)
    seen: set[tuple[str, ...]] = set()
    for reading in readings:
        row = reading.row
        if row["status"] == "OOM":
            errors["OOM rows, share of the card left free"].append(reading.left_free)
            continue
        groups = ("all", FAMILIES[row["model"]], row["trainer"])
        key = tuple(row[k] for k in ("model", "trainer", "base_quant", "grad_ckpt", "resolution", "batch", "rank"))
        if reading.memory_error is not None and key not in seen:
            seen.add(key)
            for group in (*groups, row["vram_kind"][:20]):
                errors[f"memory, {group}"].append(reading.memory_error)
        if reading.time_error is not None:
            for group in (*groups, row["gpu"]):
                errors[f"time, {group}"].append(reading.time_error)
    return errors


def report(title: str, rows: Sequence[Row], sets: Sequence[str]) -> list[Reading]:
    """What is dropped and why, every reading with its error, and errors by group; a column for each set of rules.

    The answer is what today's rules leave.
    """
    print(f"\n{title}: {len(rows)} rows\n\n{'dropped by rule':44}" + "".join(f"{name:>34}" for name in sets))
    broken = {name: {row["id"]: broken_rule(row, name) for row in rows} for name in sets}
    counts = {name: Counter(broken[name].values()) for name in sets}
    for reason in dict.fromkeys(rule.reason for rule in RULES):
        if any(counts[name][reason] for name in sets):
            print(f"{reason:44}" + "".join(f"{counts[name][reason]:34}" for name in sets))
    chosen = {name: unique(row for row in rows if broken[name][row["id"]] is None) for name in sets}
    readings: dict[tuple[str, str], Reading] = {}
    print()
    for row in rows:
        for name in sets:
            if row in chosen[name]:
                readings[row["id"], name] = predicted(row, name)
        lines: dict[str, list[str]] = defaultdict(list)
        for name in sets:
            if (row["id"], name) in readings:
                lines[readings[row["id"], name].line()].append(name)
        for line, names in lines.items():
            print(f"{' '.join(name if name in names else ' ' * len(name) for name in sets)} {line}")
            if readings[row["id"], names[0]].missed:
                print(f"{'':18}{readings[row['id'], names[0]].explanation}")
    errors = {name: errors_of([readings[row["id"], name] for row in chosen[name]]) for name in sets}
    print()
    for group in sorted({group for name in sets for group in errors[name]}):
        print(f"{group:44}" + "".join(f"{summary(errors[name].get(group, [])):>34}" for name in sets))
    return [readings[row["id"], "today"] for row in chosen["today"]]


def report_factors(readings: Sequence[Reading]) -> None:
    """Published steps over their kernels, by program."""
    factors: dict[str, list[float]] = defaultdict(list)
    for reading in readings:
        if reading.over_kernels is not None:
            factors[reading.row["trainer"]].append(reading.over_kernels)
    print(f"\npublished steps over the sum of their kernels; the cost model takes {STEP_OVER_KERNELS} for all\n")
    for program, found in (*sorted(factors.items()), ("all", [one for each in factors.values() for one in each])):
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{program:44}n {len(found):2}  geometric mean {statistics.geometric_mean(found):.2f}  {spread}")
    errors = [reading.time_error for reading in readings if reading.time_error is not None]
    print(f"\nstep time, all of today's readings: {summary(errors)}")


def summary(errors: Sequence[float]) -> str:
    """Number, median and worst."""
    if not errors:
        return "none"
    middle = statistics.median(abs(error) for error in errors)
    return f"n {len(errors)}  median {100 * middle:.1f}%  worst {100 * max(errors, key=abs):+.1f}%"


def rows_of(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--csv", type=Path, default=here / "../../shared/data/published_numbers.csv")
    fresh = [here / "data" / "fresh_readings.csv", here / "data" / "second_readings.csv"]
    parser.add_argument("--fresh", type=Path, nargs="*", default=fresh)
    arguments = parser.parse_args()
    print(
        "first, then: rules fixed before a file's errors were seen; today: some of them changed after. "
        "Errors are of our prediction."
    )
    readings = report("published_numbers.csv", rows_of(arguments.csv), ("first", "today"))
    for path in arguments.fresh:
        readings += report(f"{path.name}, collected after all rules", rows_of(path), ("then", "today"))
    report_factors(readings)


if __name__ == "__main__":
    main()
