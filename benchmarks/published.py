"""Predictions against what other trainers publish: a check of sanity, for they are other programs.

    python benchmarks/published.py [--csv ../shared/data/published_numbers.csv] [--fresh FILE ...]

`reading_rules.py` has the rules by which rows are chosen and read; the first that a row breaks is
the reason printed. Each file is judged twice: by the rules that were fixed before any of its errors
was looked at (`first` for the published numbers, `then` for the fresh readings), and by those of
`today`, some of which came after errors had been seen (`benchmarks/LOG.md` tells why). Families
that were added since (`added`) have rules of their own beside these.

Times are of other programs: by the datasheet each takes a factor of its own over the sum of its
kernels, which is printed last; the cost model has one for all (`STEP_OVER_KERNELS`), with the least
median error.
"""

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.runtime.quiet import silence_libraries

silence_libraries()

from reading_rules import (
    ADDED,
    CHECKPOINTING,
    FAMILIES,
    FOUND_RESIDENT,
    GPUS,
    LATEST,
    NEWEST,
    RESERVED,
    RULES,
    STORAGE,
    WHOLE,
    WHOLE_PIPELINE,
    WITH_VAE,
    Row,
    broken_rule,
    copied_bytes_of,
    frames_of,
    overheads_of,
    rank_of,
    resolution_of,
    rows_of,
    seconds_of,
    size_of,
    swapped_of,
    targets_of,
    text_tokens_of,
    unique,
)

from autotune.cost.predict import CostModel
from autotune.cost.timing import STEP_OVER_KERNELS
from autotune.families.resolve import resolve_model
from autotune.hardware.catalog import load_catalog, profile_of_gpu
from autotune.schema.candidate import Candidate
from autotune.schema.prediction import Prediction
from autotune.schema.workload import Bucket, Workload

MARGIN = 0.1
"""Of the card: what a plan leaves free."""
LARGE = 0.08
"""The target for the median; a larger miss is explained in `MISSES`."""
HOST = "time: as long on a card a third as fast: the host is timed"
HOLES = (
    "memory: the allocator's holes, 2 to 4 GiB where we expect 7: checkpoints fill those of "
    "the "
    "text's blocks"
)
RAMTORCH = "memory: its RamTorch keeps each layer's input, and it turns queries and keys in float64"
REFINERS = (
    "memory: refiners in bf16 (1.0 GiB), statistics not nested (.25), a block's converted "
    "weights "
    "(.35)"
)
MISSES = {
    **dict.fromkeys(("1", "468", "472"), HOST),
    **dict.fromkeys(("5", "6"), f"{HOST}; a half of the blocks checkpointed takes as long as all"),
    **dict.fromkeys(("69", "70"), "a third of the time on both cards: work that we don't count"),
    "260": (
        "memory and time: it trains layers of the sound and between the streams, too, and its "
        "host "
        "is the limit"
    ),
    **dict.fromkeys(("326", "327"), "time: half as long again on both cards, unknown why"),
    **dict.fromkeys(("412", "413", "448", "449"), RAMTORCH),
    **dict.fromkeys(("510", "511", "513", "514", "516", "517", "520"), HOLES),
    **dict.fromkeys(("702", "704"), "memory: its fp32 adapter casts each layer's input for itself"),
    "705": "time: copies of swapped blocks, 1.3 s that we predict as hidden",
    "720": "time: unknown; half of the pixels are as predicted",
    "723": REFINERS,
    "724": f"{REFINERS}; time: unknown",
    "753": "time: .67 s if compiled, so that it is its host that is timed",
    "324": "runs under autocast: with its copies and captions of 1,024 tokens about 79 GiB by hand",
    "340": "seems to keep bf16 copies of weights for the backward pass (its Chroma takes 19 GiB "
    "more than in bf16): "
    "84 GiB by hand; runs under autocast besides",
    "342": "unknown; scales and multiplies in float8, which our weight format doesn't",
    "343": "unknown; scales and multiplies in float8, which our weight format doesn't",
    "621": "memory: float8 training keeps the weights in bf16 (23.8 GB), its command keeps "
    "encoders and VAE (9.9 GB): "
    "about 36 GB by hand; time: 20 minutes of everything over 700 steps",
    "F1": "time: another program takes 1.6 times as long by image and token, on the same card (F6)",
    "F4": "time: another program takes 1.6 times as long by image and token, on the same card (F7)",
    "F5": (
        "time: likely a slip of the document, which has 1.4 seconds per step for the same "
        "elsewhere (F6)"
    ),
    "F14": "memory: likely the peak of encoding captions before (T5, CLIP and VAE: 10.5 GB "
    "predicted), for the same "
    "program's bf16 figure leaves 0.9 GB for training; time: bound by the host, whose launches "
    "nobody measured",
    "F39": "the program keeps the whole pipeline on the device (read in its code)",
    "F40": "memory: a card of 80 has GiB, and 24 of them are +8.8%; its Adam has 8 bits (+7.9%); "
    "24 has two digits "
    "(24.49: +5.7%); the rest unknown",
    "F58": "memory: must be GiB (+3.1%), for weights, checkpoints and CUDA context alone are 44 "
    "GB; time: 1,536 text "
    "tokens are assumed, its pictures make about 700 (+20%); the rest is its program's factor",
}
"""What investigations found, by the row's id."""
NAMES = {**FAMILIES, **ADDED}


def predicted(row: Row, rules: str) -> "Reading":
    """Our prediction for a row that breaks no rule of the set `rules`."""
    name = NAMES[row["model"]]
    model = resolve_model(name)
    width, height = resolution_of(row) or (0, 0)
    batch, rank = int(row["batch"]), rank_of(row) or 0
    hardware = profile_of_gpu(next(gpu for gpu in load_catalog() if gpu.id == GPUS[row["gpu"]]))
    workload = Workload(
        model=model.spec,
        resolution_px=round((width * height) ** 0.5),
        buckets=(Bucket(width_px=width, height_px=height, num_frames=frames_of(row), num_items=1),),
        max_text_tokens=text_tokens_of(row, model),
        text_padding="exact",
        num_control_images=1 if "edit" in name else 0,
        rank=rank,
        lora_alpha=float(rank),
        targets=targets_of(row, rules),
        effective_batch_size=batch * int(row["grad_accum"] or 1),
    )
    num_blocks = model.spec.num_blocks
    swapped = swapped_of(row) or 0
    candidate = Candidate(
        micro_batch_size=batch,
        checkpointed_blocks=num_blocks if CHECKPOINTING[row["grad_ckpt"]] else 0,
        quantization=STORAGE[row["base_quant"]],
        swapped_blocks=num_blocks if swapped == -1 else swapped,
    )
    own_ways = rules in ("today", "added", "after", "times")
    stay = own_ways and (row.get("other_models") == "resident" or row["id"] in FOUND_RESIDENT)
    cost = CostModel.build(
        hardware,
        workload,
        model.family,
        model.config,
        caching_pins=WHOLE_PIPELINE if stay else None,
        overheads=overheads_of(row, name) if own_ways else None,
    )
    beside = cost.resident_encoder_bytes + copied_bytes_of(row, rules)
    if row["vram_kind"] == WITH_VAE:
        beside += cost.model.vae_cost("bf16").weight_bytes
    return Reading(row, cost.predict(candidate), beside, hardware.device.total_memory_bytes or 0)


@dataclass(frozen=True)
class Reading:
    """A row with what we predict for it."""

    row: Row
    prediction: Prediction
    beside_bytes: int
    """Of what stays on the device beside what trains."""
    total_bytes: int
    """Of the device."""

    @property
    def memory_predicted(self) -> float:
        """In the row's unit, of the row's kind."""
        kind, train = self.row["vram_kind"], self.prediction
        size = train.training.run_memory_bytes if kind in WHOLE else train.allocated_memory_bytes
        if self.row["model"] in ADDED and kind in (*RESERVED, WITH_VAE):
            size = train.allocated_memory_bytes + train.training.breakdown.allocator_rounding_bytes
        is_gib = self.row["vram_unit"] == "GiB" or "divides by 1024^3" in self.row["vram_unit"]
        return (size + self.beside_bytes) / (2**30 if is_gib else 1e9)

    @property
    def memory_error(self) -> float | None:
        value = size_of(self.row)
        return self.memory_predicted / value - 1 if value else None

    @property
    def time_error(self) -> float | None:
        value = seconds_of(self.row)
        return self.prediction.step_seconds / value - 1 if value else None

    @property
    def over_kernels(self) -> float | None:
        """The published step, by the sum of its kernels and launches by the datasheet."""
        launching = (
            self.prediction.step_time.overhead_seconds + self.prediction.step_time.transfer_seconds
        )
        kernels = (self.prediction.step_seconds - launching) / STEP_OVER_KERNELS
        value = seconds_of(self.row)
        return value / (kernels + launching) if value else None

    @property
    def left_free(self) -> float:
        """Share of the card."""
        return (
            1 - (self.prediction.training.run_memory_bytes + self.beside_bytes) / self.total_bytes
        )

    def line(self) -> str:
        row = self.row
        text = f"{row['id']:>4} {row['model'][:21]:21} {row['gpu'].removeprefix('nvidia-')[:9]:9} "
        text += f"{row['base_quant'][:13]:13} {row['grad_ckpt'][:4]:4}"
        if row["status"] == "OOM":
            sizes = (
                f"{(1 - self.left_free) * self.total_bytes / 2**30:.1f} of "
                f"{self.total_bytes / 2**30:.1f} GiB"
            )
            return f"{text}  OOM, predicted {sizes}, {100 * self.left_free:+.0f}% left free"
        if self.memory_error is not None:
            text += f"  memory {row['vram_value']:>6} predicted {self.memory_predicted:6.2f}"
            text += f" {100 * self.memory_error:+6.1f}%"
        if self.time_error is not None:
            seconds = self.prediction.step_seconds
            text += (
                f"  step {row['s_per_it']:>6} predicted {seconds:6.2f} "
                f"{100 * self.time_error:+6.1f}%"
            )
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


def errors_of(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Errors by group. One memory reading counts once, whatever the GPU."""
    errors: dict[str, list[float]] = defaultdict(list)
    seen: set[tuple[str, ...]] = set()
    for reading in readings:
        row = reading.row
        if row["status"] == "OOM":
            errors["OOM rows, share of the card left free"].append(reading.left_free)
            continue
        groups = ("all", NAMES[row["model"]], row["trainer"])
        key = tuple(
            row[k]
            for k in ("model", "trainer", "base_quant", "grad_ckpt", "resolution", "batch", "rank")
        )
        if reading.memory_error is not None and key not in seen:
            seen.add(key)
            for group in (*groups, row["vram_kind"][:20]):
                errors[f"memory, {group}"].append(reading.memory_error)
        if reading.time_error is not None:
            for group in (*groups, row["gpu"]):
                errors[f"time, {group}"].append(reading.time_error)
    return errors


def report(title: str, rows: Sequence[Row], sets: Sequence[str]) -> list[Reading]:
    """What is dropped and why, every reading with its error, and errors by group; a column for each
    set of rules.

    The answer is what the last set leaves.
    """
    print(
        f"\n{title}: {len(rows)} rows\n\n{'dropped by rule':44}"
        + "".join(f"{name:>34}" for name in sets)
    )
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
        print(
            f"{group:44}" + "".join(f"{summary(errors[name].get(group, [])):>34}" for name in sets)
        )
    return [readings[row["id"], sets[-1]] for row in chosen[sets[-1]]]


def report_factors(readings: Sequence[Reading]) -> None:
    """Published steps over their kernels, by program, and the errors that are left after one
    factor for each.
    """
    factors: dict[str, list[float]] = defaultdict(list)
    for reading in readings:
        if reading.over_kernels is not None:
            factors[reading.row["trainer"]].append(reading.over_kernels)
    print(
        "\npublished steps over the sum of their kernels; the cost model takes "
        f"{STEP_OVER_KERNELS} for all\n"
    )
    for program, found in (
        *sorted(factors.items()),
        ("all", [one for each in factors.values() for one in each]),
    ):
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(
            f"{program:44}n {len(found):2}  geometric mean {statistics.geometric_mean(found):.2f}  "
            f"{spread}"
        )
    errors = [reading.time_error for reading in readings if reading.time_error is not None]
    print(f"\nstep time: {summary(errors)}")
    several = [found for found in factors.values() if len(found) > 1]
    for name, middle in (
        ("geometric mean", statistics.geometric_mean),
        ("median", statistics.median),
    ):
        left = [middle(found) / one - 1 for found in several for one in found]
        print(
            f"after one factor per program ({name}), of those with two readings or more: "
            f"{summary(left)}"
        )


def report_bands(readings: Sequence[Reading]) -> None:
    """How many readings lie within the band that is stated (`estimate`), of each program; and
    what would hold four fifths. Memory was fitted to no reading. Time has one factor that was:
    here each program has the others'."""
    for what in ("memory", "time"):
        ratios: dict[str, list[float]] = defaultdict(list)
        for one in readings:
            if what == "memory" and one.memory_error is not None:
                ratio = abs(math.log1p(one.memory_error)) / one.prediction.memory_band
            elif what == "time" and one.over_kernels is not None:
                others = [
                    r.over_kernels
                    for r in readings
                    if r.over_kernels and r.row["trainer"] != one.row["trainer"]
                ]
                ratio = (
                    abs(math.log(one.over_kernels / statistics.median(others)))
                    / one.prediction.time_uncertainty
                )
            else:
                continue
            ratios[one.row["trainer"]].append(ratio)
        for program, found in (
            *sorted(ratios.items()),
            ("all", [one for each in ratios.values() for one in each]),
        ):
            fifth = sorted(found)[math.ceil(0.8 * len(found)) - 1]
            within = sum(one <= 1 for one in found)
            print(
                f"{what:7}{program:38}{within:3} of {len(found):2} in the band; four fifths within "
                f"{fifth:.2f} of it"
            )


def summary(errors: Sequence[float]) -> str:
    """Number, median and worst."""
    if not errors:
        return "none"
    middle = statistics.median(abs(error) for error in errors)
    return f"n {len(errors)}  median {100 * middle:.1f}%  worst {100 * max(errors, key=abs):+.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument(
        "--csv", type=Path, default=here / "../../shared/data/published_numbers.csv"
    )
    fresh = [here / "data" / "fresh_readings.csv", here / "data" / "second_readings.csv"]
    parser.add_argument("--fresh", type=Path, nargs="*", default=fresh)
    arguments = parser.parse_args()
    print(
        "first, then: rules fixed before a file's errors were seen; today: some of them changed "
        "after; added: rules of "
        "families that came later, fixed before; after: with what their errors led to. Errors are "
        "of our prediction."
    )
    published = rows_of(arguments.csv)
    older = [row for row in published if row["model"] not in ADDED]
    readings = report("published_numbers.csv", older, ("first", "today"))
    for path in arguments.fresh:
        readings += report(
            f"{path.name}, collected after all rules", rows_of(path), ("then", "today")
        )
    report_factors(readings)
    added = [
        row for row in published if row["model"] in ADDED.keys() - LATEST.keys() - NEWEST.keys()
    ]
    later = report("published_numbers.csv, families added later", added, ("added", "after"))
    report_factors(later)
    latest = report(
        "published_numbers.csv, Qwen-Image 2.1",
        [row for row in published if row["model"] in LATEST],
        ("added",),
    )
    report_factors(latest)
    newest = report(
        "published_numbers.csv, LTX-2.3",
        [row for row in published if row["model"] in NEWEST],
        ("added",),
    )
    report_factors(newest)
    steps = [{**row, "vram_value": ""} for row in published if row["model"] in ADDED]
    report_factors(report("published_numbers.csv, steps without checkpoints", steps, ("times",)))
    print()
    report_bands(readings + later + latest + newest)


if __name__ == "__main__":
    main()
