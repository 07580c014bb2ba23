"""Which published readings `published.py` compares, and as what: its rules, and what a row says.

Rows are chosen by these rules; the first that a row breaks is the reason printed. Each file is
judged twice: by the rules that were fixed before any of its errors was looked at (`first` for the
published numbers, `then` for the fresh readings), and by those of `today`, some of which came after
errors had been seen (`benchmarks/LOG.md` tells why).

1. The model is one of our families.
2. It is a measurement (`evidence` measured_*), with status ok and a number, or an OOM.
3. Resolution, batch and rank are stated, the resolution is one, and the notes don't call the shape
   suspect. After errors were seen: where they do and name the example's data loader as the one that
   fits, the loader's shape counts (frames cut to what the VAE takes).
4. The GPU is stated and in our catalog.
5. The base is bf16, or stored as one of our quantizations stores it. After errors were seen: not
   what multiplies in float8, as SimpleTuner's "fp8-torchao" does (torchao's
   Float8DynamicActivationFloat8WeightConfig) and "fp8 torchao (training)" of diffusers' example
   (`convert_to_float8_training`, which also leaves the weights in bf16).
6. Checkpointing is `none` or full, per block.
7. Nothing is offloaded or swapped, and nothing is compiled.
8. The figure's kind is known: as the allocator counts (allocated, or SimpleTuner's "peak VRAM": it
   differs between GPUs by their library workspaces, which only allocated bytes show) or the whole
   process.
9. After errors were seen: something is checkpointed, or the program computes in bf16 alone.
   Trainers that accelerate prepares run under autocast: layer norms keep an fp32 copy of their
   input, and each adapter its own cast of what its neighbors share. Checkpointing drops both, so
   only rows without it are left out.
10. Text encoders and VAE are off the device while it trains, where that is known: only
    `data/fresh_readings.csv` says. After errors were seen: where they stay, the row counts, and is
    predicted with encoders and VAE that stay as well.

Readings that agree in all of model, trainer, shape, rank, weight format, checkpointing and value
(to 1%) are one reading. The fresh readings were collected, by what `data/fresh_readings.md` had
fixed, after all of these rules but those said to be later; the second collection after all of
today's.

Of families that were added after all of these, `ADDED`, the published file's readings are judged by
themselves, with these rules in addition. They were committed before any of these readings had been
predicted. So was that Chroma, which came later, is read by the same rules.

11. "N MP" is a square of N x 1024 x 1024 pixels. Where the row names the data loader of the
    source's own example, its shape counts, for the example's configuration says the same
    (SimpleTuner bc8e6ab, `simpletuner/examples`: squares of 512 px; clips of 480 px in area, taken
    as squares). A rank that the notes give as the example's is the rank.
12. Captions are as long as the program makes them, where its source says (`CAPTIONS`); else the
  family's default.
13. Fizgig adapts attention and MLPs of all blocks (`families/*.py`, block_modules), other programs
  attention.
14. Blocks that a row says to be swapped are swapped. SimpleTuner's RamTorch, which keeps all
    blocks' weights on the host and brings them layer by layer, is all blocks swapped, and for
    memory alone: its copies are timed otherwise.
15. "GB as written (code divides by 1024^3)" is GiB. Fizgig's "peak reserved" and "peak, training
    only" are what its allocator reserved (`families/train.py` logs max_memory_reserved): the
    process without its context. A size of any other kind is not compared, and such a row counts for
    time alone; so do those on a card with a desktop of which the source itself corrects the size by
    1 GB (`utils/capabilities.py`).
16. Rule 9 leaves out sizes and times, not OOM: an out-of-memory reading counts in any case.
17. A program that autotune knows as another trainer is predicted with that trainer's own overheads
    (`autotune.trainers`), by its optimizer; what stays beside the transformer is rule 10's. So are
    today's rows of the older families, whose errors had been seen.

After these errors were seen (set `after`), for Krea 2 by SimpleTuner:

18. It adapts by ends of names, so the text's fusion blocks as well, which no checkpoint holds
    (krea2/model.py, DEFAULT_LORA_TARGET); and its fused projections keep the three that they were
    made of (krea2/transformer.py, `fuse_projections`): their bytes are added.

For Qwen-Image 2.1 (`LATEST`), which came after all of these, rules 1 to 17 and the next, committed
before any of its readings had been predicted; judged by itself.

19. "peak, VAE resident for previews" is what Fizgig's allocator reserved, as in rule 15, with the
    VAE's weights in bf16 (qwen_image21/vae.py 8b82fbe, load_qwen21_vae), which are added. "int8
    W8A8" is another weight format, by rule 5.

Expected of it: sizes short by what its adapter of fp32 takes, for it casts each layer's input for
itself (families/lora.py c66bfba, LoRALinear), most at 1 MP; times within Fizgig's own factor, .94.

For LTX-2.3 (`NEWEST`), which came last, rules 1 to 17 and the next, committed before any of its
readings had been predicted; judged by itself.

20. Where a row has the shape that the document tells and the area of the example's data loader, the
    area's square counts, as by rule 11, to a multiple of what the model takes; frames are those
    that its VAE takes. SimpleTuner keeps the connectors on the device (ltxvideo2/model.py,
    post_model_load_setup): their bytes are added. It gives the sound silence as long as the clip
    (_build_empty_audio_latents), which autotune does not compute.

Expected: memory short, for weights and connectors are 41 of 48 GiB and its other copies are not
known; the time short, by the sound.

Changes of 25 November. No row is unseen any more, so what is changed is chosen by what was read in
sources and in published measurements of kernels, and rows are split before anything of it was
predicted: terms are developed on SimpleTuner's Krea 2 at 512 px (178, 179, 509 to 511, 515 to 517);
all other rows report. Expected:

- SimpleTuner's "int8-torchao" computes gradients of all frozen weights and stores all linear layers
  in 8 bits: its rows longer by a quarter, so that they need the factor of its bf16 rows, and .7 GiB
  less; at 1,024 px the same.
- Cards with an L2 cache of 64 MiB and more hold what kernels of small images move in nearly all of
  it, not in half: L40S, 4090, 5090 and RTX PRO 6000 faster where 4,096 tokens or fewer are in bf16,
  H100 hardly, memory as it was.
- Products with 8-bit weights outside of a backward pass of their own keep a converted copy
  (ai-toolkit, musubi, sd-scripts, OneTrainer): no row of memory has it, F20 and F23 by sd-scripts
  are times alone.

One kind of rows was never predicted until then, and is once, by itself:

22. Steps without checkpoints of `ADDED`, which rule 9 leaves out, count for time alone (set
    `times`): copies of what autocast casts take memory, and little time. OOM apart.

Expected: steps within 15% after the factor of SimpleTuner's Krea 2, but for Z-Image and Chroma on
the H100, which wait for the host.
"""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from autotune.families.resolve import ResolvedModel
from autotune.hardware.catalog import load_catalog
from autotune.schema import Overheads
from autotune.trainers import get_trainer

FAMILIES = {
    "Qwen-Image (20B)": "qwen-image",
    "Qwen-Image-Edit": "qwen-image-edit",
    "Qwen-Image-Edit (20B)": "qwen-image-edit",
    "Qwen-Image-Edit-2509": "qwen-image-edit-plus",
    "FLUX.1-dev (12B)": "flux1-dev",
    "Kandinsky5 Video Lite 2B T2V": "kandinsky5-video-lite",
    **{
        name: name
        for name in ("flux1-dev", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus")
    },
    **{name: name for name in ("kandinsky5-image-lite", "kandinsky5-video-lite")},
}
NEWEST = {"LTX-Video 2.3": "ltx-2.3"}
LATEST = {"Qwen-Image-2.1 (7B, NOT the 20B Qwen-Image)": "qwen-image-2.1"}
ADDED = {
    "Chroma (8.9B FLUX.1 derivative)": "chroma",
    **LATEST,
    **NEWEST,
    "Krea 2": "krea-2",
    "Krea 2 (12.9B)": "krea-2",
    "Krea 2 raw (12.9B)": "krea-2",
    "Z-Image": "z-image",
    "Z-Image DeTurbo (6B)": "z-image",
    "Z-Image-Turbo (6B)": "z-image-turbo",
    "FLUX.2-klein-4B": "flux2-klein",
    "FLUX.2-klein-4b": "flux2-klein",
    "FLUX.2-klein-9B": "flux2-klein-9b",
    "FLUX.2-klein-9b": "flux2-klein-9b",
    "FLUX.2-klein-base-9B": "flux2-klein-9b",
    "FLUX.2 (klein-9B default)": "flux2-klein-9b",
    "Wan2.1": "wan-2.1",
    "Wan2.1 T2V 1.3B": "wan-2.1",
    "Wan2.1 T2V 14B": "wan-2.1-14b",
    "Wan 14B T2V": "wan-2.1-14b",
}
"""Models of families that were added after the rules for `FAMILIES`."""
CAPTIONS = {
    ("SimpleTuner", "chroma"): 512,  # chroma/model.py pads to max_sequence_length, under a mask
    ("SimpleTuner", "krea-2"): 512,  # krea2/pipeline.py pads to max_sequence_length, under a mask
    (
        "SimpleTuner",
        "z-image-turbo",
    ): 32,  # z_image/model.py drops padding; its example's caption is one character
}
"""Tokens of a caption, by program and model."""
BY_ENDS = "to_q,to_k,to_v,to_out.0"
FUSED_PARAMETERS = 28 * 6144 * (6144 + 2 * 1536) + 4 * 2560 * 3 * 2560
"""Of Krea 2's query, key and value projections, in its blocks and its text's."""
CONNECTORS_BYTES = 2 * 3_172_227_584
"""Of LTX-2.3's, in bf16."""
TRAINERS = {
    "SimpleTuner": "simpletuner",
    "ai-toolkit": "ai-toolkit",
    "diffusers": "diffusers",
    "sd-scripts": "sd-scripts",
    "FluxGym": "sd-scripts",
    "musubi-tuner": "musubi",
    "OneTrainer": "onetrainer",
}
"""Autotune's name of a trainer, by how the row's begins. What has a diffusers script of its own
is none of these.
"""
OPTIMIZERS: dict[str, tuple[str, dict[str, str | bool]]] = {
    "simpletuner": ("optimizer", {}),
    "ai-toolkit": ("train.optimizer", {"AdamW8bit": "adamw8bit"}),
    "sd-scripts": ("optimizer_type", {}),
    "musubi": ("optimizer_type", {}),
    "onetrainer": ("optimizer.optimizer", {}),
    "diffusers": ("use_8bit_adam", {"AdamW8bit": True, "8-bit AdamW": True}),
}
"""The key of a trainer's optimizer, and its values where the row words them otherwise."""
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
    "RTX PRO 6000 Blackwell": "nvidia-rtx-pro-6000",
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
CHECKPOINTING = {
    "none": False,
    "full per-block (torch)": True,
    "full": True,
    "full (default)": True,
}
UNDER_AUTOCAST = (
    "SimpleTuner",
    "diffusers",
    "sd-scripts",
    "musubi-tuner",
    "flymyai-lora-trainer",
    "x-flux",
)
ALLOCATED = ("peak allocated", 'peak (doc: "peak VRAM GiB")')
WHOLE = (
    "peak nvidia-smi",
    "peak",
    "peak, training only",
    "peak reserved, first epoch",
    "user reading",
)
RESERVED = ("peak reserved, first epoch", "peak, training only")
"""Of the programs of `ADDED`: without the context of the process."""
WITH_VAE = "peak, VAE resident for previews"
"""Of `LATEST`: reserved, with the VAE's weights."""
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
    """A reason to leave a row out, and which sets of rules have it."""

    reason: str
    broken: Callable[[Row], bool]
    sets: tuple[str, ...] = ("first", "then", "today", "added", "after", "times")


def no_measurement(row: Row) -> bool:
    numbers = row["vram_value"] or row["s_per_it"]
    return not (
        row["evidence"].startswith("measured")
        and (row["status"] == "OOM" or (row["status"] == "ok" and numbers))
    )


def shape_unknown(row: Row) -> bool:
    return resolution_of(row) is None or not row["batch"] or rank_of(row) is None


def no_plain_step(row: Row) -> bool:
    return not row["s_per_it"] or CHECKPOINTING[row["grad_ckpt"]]


def keeps_casts(row: Row) -> bool:
    is_counted = row["status"] == "OOM" and row["model"] in ADDED
    return (
        not is_counted
        and not CHECKPOINTING[row["grad_ckpt"]]
        and row["trainer"].startswith(UNDER_AUTOCAST)
    )


def moves_otherwise(row: Row) -> bool:
    """Whether something is offloaded in a way that autotune has no setting for."""
    return row["offload_or_swap"] not in NOTHING and swapped_of(row) is None


def nothing_comparable(row: Row) -> bool:
    return row["status"] == "ok" and size_of(row) is None and seconds_of(row) is None


NOTHING = ("", "none")
OLDER = ("first", "then", "today")
NEWER = ("added", "after", "times")
RULES = (
    Rule("1 not our model", lambda row: row["model"] not in FAMILIES, OLDER),
    Rule("2 no measurement", no_measurement),
    Rule("3 shape unknown", shape_unknown),
    Rule("3 shape called suspect", lambda row: "SUSPECT" in row["notes"], ("first",)),
    Rule("4 GPU unknown", lambda row: row["gpu"] not in GPUS),
    Rule("5 other weight format", lambda row: row["base_quant"] not in STORAGE),
    Rule(
        "5 multiplies in float8",
        lambda row: row["base_quant"] in IN_FLOAT8,
        ("then", "today", *NEWER),
    ),
    Rule("6 other checkpointing", lambda row: row["grad_ckpt"] not in CHECKPOINTING),
    Rule("7 compiled", lambda row: row["compile"] not in NOTHING),
    Rule("7 offloaded", lambda row: row["offload_or_swap"] not in NOTHING, OLDER),
    Rule("7 offloaded otherwise", moves_otherwise, NEWER),
    Rule(
        "8 kind unknown",
        lambda row: bool(row["vram_value"]) and row["vram_kind"] not in (*ALLOCATED, *WHOLE),
        OLDER,
    ),
    Rule("8 nothing comparable", nothing_comparable, NEWER),
    Rule("9 keeps autocast's copies", keeps_casts, ("then", "today", "added", "after")),
    Rule("22 no step without checkpoints", no_plain_step, ("times",)),
    Rule(
        "10 other models resident",
        lambda row: row.get("other_models") == "resident",
        ("first", "then"),
    ),
)


def broken_rule(row: Row, rules: str) -> str | None:
    """The first rule that `row` breaks of the set `rules`."""
    return next((rule.reason for rule in RULES if rules in rule.sets and rule.broken(row)), None)


def resolution_of(row: Row) -> tuple[int, int] | None:
    """Width and height in pixels."""
    megapixels = re.fullmatch(r"~?([\d.]+) MP", row["resolution"])
    if megapixels and row["model"] in ADDED:
        side_px = round(float(megapixels[1]) ** 0.5 * 1024 / 16) * 16
        return side_px, side_px
    example = re.search(r"(\d+)(?: px-area)? \(example dataloader", row["resolution"])
    if example and row["model"] in ADDED:
        return int(example[1]), int(example[1])
    area = re.search(r"\(doc\); (\d+) px-area \(example\)", row["resolution"])
    if area and row["model"] in NEWEST:
        side_px = int(area[1]) // 32 * 32
        return side_px, side_px
    loader = re.search(r"(\d+) px-area \(example dataloader\)", row["resolution"])
    if loader and "only fits the latter" in row["notes"]:
        return int(loader[1]), int(loader[1])
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", row["resolution"])
    return (
        (int(match[1]), int(match[2] or match[1]))
        if match and "SUSPECT" not in row["notes"]
        else None
    )


def frames_of(row: Row) -> int:
    """Frames of a clip; 1 for an image."""
    match = re.search(r"(\d+)(?: \(example dataloader\))?$", row["frames"])
    factor = 8 if row["model"] in NEWEST else 4
    return (int(match[1]) - 1) // factor * factor + 1 if match else 1


def rank_of(row: Row) -> int | None:
    example = re.search(r"\(example rank (\d+)\)", row["notes"]) if row["model"] in ADDED else None
    rank = example[1] if example else row["rank"]
    return int(rank) if rank.isdigit() else None


def swapped_of(row: Row) -> int | None:
    """Number of swapped blocks, -1 for all; None if something else is offloaded."""
    offloaded = row["offload_or_swap"]
    swap = re.fullmatch(r"swap (\d+) of \d+", offloaded)
    if offloaded in NOTHING or swap:
        return int(swap[1]) if swap else 0
    return -1 if offloaded == "RamTorch blocks.* (100%)" else None


def size_of(row: Row) -> float | None:
    """Memory in the row's unit; None if it is not stated, or of no known kind."""
    value = row["vram_value"].lstrip("~")
    kinds = (*ALLOCATED, *WHOLE, *(RESERVED if row["model"] in ADDED else ()))
    kinds += (WITH_VAE,) if row["model"] in LATEST else ()
    has_desktop = row["model"] in ADDED and row["source"].startswith(
        "shootthesound/Fizgig src/fizgig/utils"
    )
    return float(value) if value and row["vram_kind"] in kinds and not has_desktop else None


def seconds_of(row: Row) -> float | None:
    """Of a step; None if it is not stated, or takes copies that autotune would not make."""
    return float(row["s_per_it"].lstrip("~")) if row["s_per_it"] and swapped_of(row) != -1 else None


def text_tokens_of(row: Row, model: ResolvedModel) -> int:
    own = CAPTIONS.get((row["trainer"], ADDED.get(row["model"], "")))
    return int(row.get("text_tokens") or own or model.family.defaults.text_tokens)


def targets_of(row: Row, rules: str) -> str:
    usual = "attention+mlp" if row["trainer"] == "Fizgig" else "attention"
    return row.get("targets") or (
        BY_ENDS if rules in ("after", "times") and fuses_projections(row) else usual
    )


def fuses_projections(row: Row) -> bool:
    return row["trainer"] == "SimpleTuner" and ADDED.get(row["model"]) == "krea-2"


def copied_bytes_of(row: Row, rules: str) -> int:
    """Of projections that a program keeps beside the fused one, and of connectors."""
    if row["model"] in NEWEST and row["trainer"] == "SimpleTuner":
        return CONNECTORS_BYTES
    element_bytes = 2 if STORAGE[row["base_quant"]] == "none" else 1
    return (
        FUSED_PARAMETERS * element_bytes
        if rules in ("after", "times") and fuses_projections(row)
        else 0
    )


def overheads_of(row: Row, model: str) -> Overheads | None:
    """Of a program that autotune knows as another trainer, as its table says; what stays on the
    device is rule 10's.
    """
    name = next(
        (ours for theirs, ours in TRAINERS.items() if row["trainer"].startswith(theirs)), None
    )
    if name is None or "flux_lora_quantization" in row["trainer"]:
        return None
    trainer = get_trainer(name)
    known = next((one for one in trainer.models if one.name == model), None)
    key, values = OPTIMIZERS[name]
    written = {key: values.get(row["optimizer"], row["optimizer"])} if row["optimizer"] else {}
    found = trainer.for_model(known).overheads_of(written, known) if known else None
    return found.changed(kept=()) if found else None


def unique(rows: Iterable[Row]) -> list[Row]:
    """One row for each reading."""
    seen: dict[tuple[str, ...], Row] = {}
    for row in rows:
        fields = ("model", "trainer", "resolution", "batch", "rank", "base_quant", "grad_ckpt")
        value = row["vram_value"].lstrip("~")
        size = (
            f"{float(value):.1f}"
            if value and float(value) < 30
            else f"{float(value):.0f}"
            if value
            else row["gpu"]
        )
        seen.setdefault((*(row[field] for field in fields), size, row["s_per_it"]), row)
    return list(seen.values())


def rows_of(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
