"""Predictions against what other trainers publish: a check of sanity, for they are other programs.

    python benchmarks/published.py [--csv FILE] [--fresh FILE ...] [--asked FILE ...]

Rows are chosen by these rules; the first that a row breaks is the reason printed. They were fixed
before any error was seen, but for what is marked with *: that was found in a program's source after
its errors had been seen (`benchmarks/DECISIONS.md`; `results/published-*-first.txt` have the errors
as they were before).

1. The model is one of our families.
2. It is a measurement (`evidence` measured_*), with status ok and a number, or an OOM.
3. Resolution, batch and rank are stated, the resolution is one, and the notes don't call the shape
   suspect; * where they name the example's data loader as the one that fits, its shape counts
   (frames cut to what the VAE takes).
4. The GPU is stated and in our catalog.
5. The base is bf16, or stored as one of our formats stores it; * not what multiplies in float8.
6. Checkpointing is `none` or full, per block.
7. Nothing is compiled, offloaded or swapped.
8. The figure's kind is known: as the allocator counts, or the whole process.
9. * Something is checkpointed, or the program computes in bf16 alone: under autocast layer norms
   keep an fp32 copy of their input, and each adapter its own cast. OOM of `ADDED` count anyway, and
   such steps are told apart, for their time alone.
10. Text encoders and VAE are off the device while it trains, where that is known (only
    `data/fresh_readings.csv` says); * where they stay, they do in the prediction.

Families that were added later (`ADDED`) have these in addition:

11. "N MP" is a square of N x 1024 x 1024 pixels. Where the row names the data loader of the
    source's own example, its shape counts (squares; clips in area), and its rank.
12. Captions are as long as the program makes them, where its source says (`CAPTIONS`).
13. Fizgig adapts attention and MLPs of all blocks, other programs attention.
14. Blocks that a row says to be swapped are. SimpleTuner's RamTorch is all blocks swapped, and for
    memory alone.
15. "GB as written (code divides by 1024^3)" is GiB. Fizgig's "peak reserved", "peak, training only"
    and "peak, VAE resident for previews" are what its allocator reserved, the last with the VAE's
    weights. A size of another kind is not compared; such a row counts for time alone, as do those
    on a card with a desktop of which the source corrects the size by 1 GB.
16. A program that autotune knows as another trainer is predicted with that trainer's own overheads.
17. * Krea 2 by SimpleTuner adapts by ends of names, and its fused projections keep the three that
    they were made of. LTX-2.3 by SimpleTuner keeps the connectors on the device.

18. * Files that are `--asked` have arguments of `autotune estimate` for what a source does not say.
19. * Copies of swapped blocks wait as the program's source makes them wait (`Overheads.swap`).
20. * The attention that a row names is the one that runs.
21. * ai-toolkit trains each image at every stated size equally often (toolkit/config_modules.py
    1095-1113 @27a03a91): times are those of the mean area, and sizes are not compared.
22. * A script that encodes each picture in every step (`ENCODES`) takes that long besides.
23. * Other programs run the sound's branch of LTX-2, too (`WithSound`), and SimpleTuner turns
    Qwen-Image's queries and keys by real numbers (`turned`).
24. * A peak that is counted from a program's start (`FROM_THE_START`) is at least that of encoding
    captions.
25. * A step that by the prediction needs half as much again as its card has is not timed: more
    is offloaded than its source says.
26. * Fizgig's nf4 is of what it adapts alone, with maxima in fp32, and a block's converted weights
    stay for their backward pass (`beyond_nf4_bytes`).

Readings that agree in model, trainer, shape, rank, weight format, checkpointing and value (to 1%)
are one. All are predicted by a plain `autotune estimate`, too, which knows no other program: the
model alone, its usual captions and the settings. Times are of other programs: by the datasheet each
takes a factor of its own over the sum of its kernels, which is printed; the cost model has one for
all (`STEP_OVER_KERNELS`).
"""

import argparse
import csv
import math
import re
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotune.system.process import silence_libraries

silence_libraries()

import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor, nn

from autotune.cost.kernels import nf4_bytes
from autotune.cost.predict import CostModel
from autotune.cost.timing import MATMUL_EFFICIENCY, STEP_OVER_KERNELS, Rates
from autotune.interop.trainer import get_trainer
from autotune.knobs.formats import NF4_BLOCK
from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.family import Batch, Family, build_on_meta
from autotune.models.ltx2 import LTX2
from autotune.models.resolve import ResolvedModel, resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.prediction import (
    MEMORY_SIGMAS,
    TIME_SIGMAS,
    AdapterPractice,
    Overheads,
    Prediction,
    SwapPractice,
)
from autotune.plan.workload import Bucket, OptimizerChoice, Workload

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
ASKED = ("sdxl", "z-image", "krea-2", "wan-2.1-14b", "wan-2.2-14b", "ltx-2", "ltx-2.3", "flux2-dev")
NAMES = {**FAMILIES, **ADDED, **{name: name for name in (*ASKED, "z-image-turbo", "qwen-image")}}
CAPTIONS = {
    ("SimpleTuner", "chroma"): 512,  # chroma/model.py pads to max_sequence_length, under a mask
    ("SimpleTuner", "qwen-image"): 8,  # its example's caption is one character, in a template
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
KEEP_CONNECTORS = ("SimpleTuner", "LTX-2 trainer")
"""The second by packages/ltx-trainer/src/ltx_trainer/trainer.py 381, 425 @400fd31."""
ENCODES = {
    "huggingface/autotrain-advanced issue#172": "fp32",
    "huggingface/diffusers PR#4470": "fp16",
}
"""Precision of the VAE, by source: trainers/dreambooth/trainer.py of autotrain @0891af2, and
examples/dreambooth/train_dreambooth_lora_sdxl.py @000280f with the VAE that its README names."""
FROM_THE_START = ("unsloth diffusion",)
"""Programs that never reset the allocator's peak (diffusion_dit_trainer.py 2314 @015bdef)."""
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
is none of these."""
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
STORAGE = {
    "bf16": "none",
    "none (bf16)": "none",
    "full_bf16": "none",
    "fp8wo-torchao": "torchao-fp8",
    "int8-torchao": "torchao-int8",
    "nf4": "bnb-nf4",
    "nf4 (QLoRA)": "bnb-nf4",
    **{name: name for name in ("none", "bnb-nf4", "torchao-int8", "torchao-fp8")},
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
FIZGIG = Overheads(  # which comes from musubi-tuner
    program="Fizgig",
    version="0d7b7a02",
    source="src/fizgig/krea2/trainer.py, networks/lora.py",
    adapter=AdapterPractice(precision="bf16", optimizer_bytes=4, step_bytes=2),
    swap=SwapPractice(from_pinned=False, copies_back=True, slots="resident"),
)
LOCKS_SINCE = "2026-06"
"""Since then ai-toolkit locks the memory of quantized weights; copies from it were synchronous."""
ADAFACTOR = {"bmaltais/kohya_ss issue#1288"}
"""Sources that name an optimizer which steps each tensor by itself, in a comment beside the figure.
"""
ATTENTION = {
    "native-efficient": "_native_efficient",
    "cudnn": "_native_cudnn",
    "flash-attn-varlen-hub": "flash",
}
WHOLE_PIPELINE = {
    "residency": "keep",
    "text_encoder_device": "training",
    "text_encoder_quantization": "none",
    "text_encoder_streamed": "false",
}
PLAIN = "autotune estimate"
FOUND_RESIDENT = ("F39",)
"""Rows that don't say whether the other models stay on the device; the program's code does."""


Row = dict[str, str]


@dataclass(frozen=True)
class Rule:
    """A reason to leave a row out, and the rows that it is for."""

    reason: str
    broken: Callable[[Row], bool]
    applies: Callable[[Row], bool] = lambda row: True


def no_measurement(row: Row) -> bool:
    numbers = row["vram_value"] or row["s_per_it"]
    return not (
        row["evidence"].startswith("measured")
        and (row["status"] == "OOM" or (row["status"] == "ok" and numbers))
    )


def shape_unknown(row: Row) -> bool:
    return resolution_of(row) is None or not row["batch"] or rank_of(row) is None


def is_older(row: Row) -> bool:
    return row["model"] not in ADDED and "autotune_args" not in row


def keeps_casts(row: Row) -> bool:
    is_counted = row["status"] == "OOM" and row["model"] in ADDED
    return (
        not is_counted
        and not CHECKPOINTING[row["grad_ckpt"]]
        and row["trainer"].startswith(UNDER_AUTOCAST)
    )


def moves_otherwise(row: Row) -> bool:
    return row["offload_or_swap"] not in NOTHING and swapped_of(row) is None


def nothing_comparable(row: Row) -> bool:
    return row["status"] == "ok" and size_of(row) is None and seconds_of(row) is None


NOTHING = ("", "none")
RULES = (
    Rule("1 not our model", lambda row: row["model"] not in NAMES),
    Rule("2 no measurement", no_measurement),
    Rule("3 shape unknown", shape_unknown),
    Rule("4 GPU unknown", lambda row: row["gpu"] not in GPUS),
    Rule("5 other weight format", lambda row: row["base_quant"] not in STORAGE),
    Rule("6 other checkpointing", lambda row: row["grad_ckpt"] not in CHECKPOINTING),
    Rule("7 compiled", lambda row: row["compile"] not in NOTHING),
    Rule("7 offloaded", lambda row: row["offload_or_swap"] not in NOTHING, is_older),
    Rule("7 offloaded otherwise", moves_otherwise),
    Rule(
        "8 kind unknown",
        lambda row: bool(row["vram_value"]) and row["vram_kind"] not in (*ALLOCATED, *WHOLE),
        is_older,
    ),
    Rule("8 nothing comparable", nothing_comparable),
)


def broken_rule(row: Row, *, steps_alone: bool = False) -> str | None:
    """The first rule that `row` breaks."""
    found = next((rule.reason for rule in RULES if rule.applies(row) and rule.broken(row)), None)
    if found:
        return found
    if steps_alone:
        has_step = row["s_per_it"] and not CHECKPOINTING[row["grad_ckpt"]]
        return None if has_step else "9 no step without checkpoints"
    return "9 keeps autocast's copies" if keeps_casts(row) else None


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
    own = CAPTIONS.get((row["trainer"], NAMES[row["model"]]))
    return int(row.get("text_tokens") or own or model.family.defaults.text_tokens)


def targets_of(row: Row) -> str:
    usual = "attention+mlp" if row["trainer"] == "Fizgig" else "attention"
    return row.get("targets") or (BY_ENDS if fuses_projections(row) else usual)


def attention_of(row: Row) -> str:
    name, _, when = row.get("attention", "").partition(" (")
    is_meant = not when or CHECKPOINTING[row["grad_ckpt"]]
    return ATTENTION.get(name, "native") if is_meant else "native"


def fuses_projections(row: Row) -> bool:
    return row["trainer"] == "SimpleTuner" and ADDED.get(row["model"]) == "krea-2"


def copied_bytes_of(row: Row) -> int:
    """Of projections that a program keeps beside the fused one, and of connectors."""
    if NAMES[row["model"]] == "ltx-2.3" and row["trainer"] in KEEP_CONNECTORS:
        return CONNECTORS_BYTES
    element_bytes = 2 if STORAGE[row["base_quant"]] == "none" else 1
    return FUSED_PARAMETERS * element_bytes if fuses_projections(row) else 0


def beyond_nf4_bytes(model: ResolvedModel) -> int:
    """Of Fizgig's nf4, beyond ours (src/fizgig/families/quant.py 36-80 and zimage/driver.py 13,
    src/fizgig/modules/nf4.py 59-67, 79 @5661e0a)."""
    lists = model.family.find_block_lists(build_on_meta(model.family, model.config))
    extra, kept = 0, [0]
    for kind, block in ((kind, block) for kind, blocks in lists.items() for block in blocks):
        layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        sizes = {name: layer.weight.numel() for name, layer in layers.items()}
        plain = {name for name in sizes if "refiner" in kind or "modulation" in name}
        extra += sum(2 * sizes[name] - nf4_bytes(sizes[name]) for name in plain)
        stored = [size for name, size in sizes.items() if name not in plain]
        extra += sum(size // 2 + 4 * size // NF4_BLOCK - nf4_bytes(size) for size in stored)
        kept.append(2 * (sum(stored) - max(stored, default=0)))
    return extra + max(kept)


def overheads_of(row: Row, model: str) -> Overheads | None:
    """Of a program that autotune knows as another trainer, as its table says; what stays on the
    device is rule 10's."""
    name = next(
        (ours for theirs, ours in TRAINERS.items() if row["trainer"].startswith(theirs)), None
    )
    if row["trainer"] == "Fizgig" and swapped_of(row):
        return FIZGIG
    if name is None or "flux_lora_quantization" in row["trainer"]:
        return None
    trainer = get_trainer(name)
    known = next((one for one in trainer.models if one.name == model), None)
    if known is None and "autotune_args" in row:  # its ways with another model
        known = trainer.models[0]
    key, values = OPTIMIZERS[name]
    written = {key: values.get(row["optimizer"], row["optimizer"])} if row["optimizer"] else {}
    found = trainer.for_model(known).overheads_of(written, known) if known else None
    if found and name == "ai-toolkit" and row.get("date", "") < LOCKS_SINCE:
        found = found.changed(swap=found.swap.changed(from_pinned=False, slots="one"))
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


def as_asked(number: int, row: Row) -> Row:
    """A row with the arguments of `autotune estimate` for what its source does not state."""
    words = iter(shlex.split(row["autotune_args"]))
    given = dict(zip(words, words, strict=True))
    size = given.get("--micro-batch-size", "1")
    swapped = given.get("--swapped-blocks", "")
    is_oom = row["vram_value"] == "OOM"
    is_mixed, is_several = (
        bool(row["s_per_it"] and word in row["resolution"]) for word in ("mix", "buckets")
    )
    return {
        **row,
        "id": f"N{number}",
        "gpu": row["autotune_hardware"],
        "resolution": "" if is_mixed else given.get("--resolution", "1024"),
        "frames": given.get("--frames", ""),
        "batch": size,
        "grad_accum": str(int(given["--batch"]) // int(size)),
        "rank": given.get("--rank", "16"),
        "targets": given.get("--targets", ""),
        "base_quant": given.get("--quantization", "none"),
        "grad_ckpt": "unknown"
        if "perhaps no gradient checkpointing" in row["notes"]
        else "none"
        if given.get("--checkpointing") == "none"
        else "full",
        "offload_or_swap": f"swap {swapped} of 99" if swapped else "",
        "compile": "",
        "optimizer": "",
        "vram_value": "" if is_oom or is_several else row["vram_value"],
        "vram_kind": "user reading" if row["vram_value"] else "",
        "status": "OOM" if is_oom else "ok",
    }


def rows_of(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    has_arguments = rows and "autotune_args" in rows[0]
    return [as_asked(*each) for each in enumerate(rows, start=1)] if has_arguments else rows


class WithSound(LTX2):
    """LTX-2 with the sound of a clip, 25 latents a second, whose branch and the video's attend to
    each other: ai-toolkit's ltx2.py 1003-1080 @27a03a91, SimpleTuner's ltxvideo2/model.py 2592-2678
    @bc8e6ab, and ltx_trainer's trainer.py 388 @400fd31."""

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        def heard(**options: Any) -> Any:
            clip = 8 * (noisy.shape[2] - 1) + 1
            lengths = {"": round(25 * clip / self.defaults.frames_per_second), "encoder_": 1024}
            sizes = {f"audio_{name}hidden_states": size for name, size in lengths.items()}
            sound = {name: options[name].repeat(1, size, 1) for name, size in sizes.items()}
            options |= {"audio_num_frames": lengths[""], "isolate_modalities": False}
            return transformer(**options | sound)

        heard.module = transformer  # type: ignore[attr-defined]
        return super().predict(heard, noisy, levels, batch)


def turned(x: Tensor, angles: Tensor, **_: bool) -> Tensor:
    """Rotate pairs in fp32 by cosines and sines (qwen_image/transformer.py 319-324, 1318
    @bc8e6ab)."""
    cos, sin = (part.repeat_interleave(2, -1)[:, None] for part in (angles.real, angles.imag))
    first, second = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    across = torch.stack([-second, first], -1).flatten(3)
    return (x.float() * cos + across * sin).type_as(x)


@contextmanager
def as_the_program(row: Row, model: ResolvedModel) -> Iterator[Family]:
    """The family as the row's program runs it."""
    family, ours = copy(model.family), transformer_qwenimage.apply_rotary_emb_qwen
    if isinstance(family, LTX2) and row["trainer"] != PLAIN:
        family.__class__ = WithSound
    is_turned = row["trainer"] == "SimpleTuner" and NAMES[row["model"]] == "qwen-image"
    with patch.object(
        transformer_qwenimage, "apply_rotary_emb_qwen", turned if is_turned else ours
    ):
        yield family


def predicted(row: Row) -> "Reading":
    with as_the_program(row, resolve_model(ModelRef.of(NAMES[row["model"]]))) as family:
        return _predicted(row, family)


def _predicted(row: Row, family: Family) -> "Reading":
    """Our prediction for a row that breaks no rule."""
    name = NAMES[row["model"]]
    model = resolve_model(ModelRef.of(name))
    width, height = resolution_of(row) or (0, 0)
    batch, rank = int(row["batch"]), rank_of(row) or 0
    gpu = next(gpu for gpu in load_catalog() if gpu.id == GPUS[row["gpu"]])
    hardware = profile_of_gpu(gpu)
    workload = Workload(
        model=model.spec,
        resolution_px=round((width * height) ** 0.5),
        buckets=(Bucket(width_px=width, height_px=height, num_frames=frames_of(row), num_items=1),),
        max_text_tokens=text_tokens_of(row, model),
        text_padding="exact",
        num_control_images=1 if "edit" in name else 0,
        rank=rank,
        lora_alpha=float(rank),
        targets=targets_of(row),
        optimizer=OptimizerChoice(name="adamw-8bit" if row["source"] in ADAFACTOR else "adamw"),
        effective_batch_size=batch * int(row["grad_accum"] or 1),
    )
    num_blocks = model.spec.num_blocks
    swapped = swapped_of(row) or 0
    candidate = Candidate(
        micro_batch_size=batch,
        checkpointed_blocks=num_blocks if CHECKPOINTING[row["grad_ckpt"]] else 0,
        precision="bf16" if gpu.bf16_tflops else "fp16",
        quantization=STORAGE[row["base_quant"]],
        swapped_blocks=num_blocks if swapped == -1 else swapped,
        attention=attention_of(row),
    )
    stay = row.get("other_models") == "resident" or row["id"] in FOUND_RESIDENT
    cost = CostModel.build(
        hardware,
        workload,
        family,
        model.config,
        caching_pins=WHOLE_PIPELINE if stay else None,
        overheads=overheads_of(row, name),
    )
    beside = cost.resident_encoder_bytes + copied_bytes_of(row)
    if row["trainer"] == "Fizgig" and candidate.quantization == "bnb-nf4":
        beside += beyond_nf4_bytes(model)
    if row["vram_kind"] == WITH_VAE:
        beside += cost.model.vae_cost("bf16").weight_bytes
    encoders = 2 * sum(cost.model.parts.text_encoder_parameters)
    encoded = 0.0
    if precision := ENCODES.get(row["source"]):
        rates = Rates(hardware, precision, "native", "efficient")
        flops = workload.effective_batch_size * cost.model.vae_cost(precision).encode_flops
        encoded = STEP_OVER_KERNELS * flops / (rates.reached * MATMUL_EFFICIENCY)
    return Reading(
        row,
        cost.predict(candidate),
        beside,
        hardware.device.total_memory_bytes or 0,
        encoders if row["trainer"] in FROM_THE_START else 0,
        encoded,
    )


@dataclass(frozen=True)
class Reading:
    """A row with what we predict for it."""

    row: Row
    prediction: Prediction
    beside_bytes: int
    """Of what stays on the device beside what trains."""
    total_bytes: int
    """Of the device."""
    encoders_bytes: int = 0
    """Of text encoders in bf16, where their peak counts."""
    encoding_seconds: float = 0.0
    """Of a step's pictures, by a script that encodes them anew."""

    @property
    def seconds(self) -> float | None:
        """Of the published step, if it can be the predicted one."""
        return seconds_of(self.row) if self.left_free > -0.5 else None

    @property
    def step_seconds(self) -> float:
        return self.prediction.step_seconds + self.encoding_seconds

    @property
    def memory_predicted(self) -> float:
        """In the row's unit, of the row's kind."""
        kind, train = self.row["vram_kind"], self.prediction
        size = train.training.run_memory_bytes if kind in WHOLE else train.allocated_memory_bytes
        if self.row["model"] in ADDED and kind in (*RESERVED, WITH_VAE):
            size = train.allocated_memory_bytes + train.training.breakdown.allocator_rounding_bytes
        is_gib = self.row["vram_unit"] == "GiB" or "divides by 1024^3" in self.row["vram_unit"]
        size = max(size + self.beside_bytes, self.encoders_bytes)
        return size / (2**30 if is_gib else 1e9)

    @property
    def memory_error(self) -> float | None:
        value = size_of(self.row)
        return self.memory_predicted / value - 1 if value else None

    @property
    def time_error(self) -> float | None:
        return self.step_seconds / self.seconds - 1 if self.seconds else None

    @property
    def waiting_seconds(self) -> float:
        """For the host and for copies, which no factor over kernels changes."""
        time = self.prediction.step_time
        return time.overhead_seconds + time.transfer_seconds

    @property
    def kernel_seconds(self) -> float:
        """The sum of kernels by the datasheet."""
        return (self.step_seconds - self.waiting_seconds) / STEP_OVER_KERNELS

    @property
    def over_kernels(self) -> float | None:
        """The published step, by the sum of its kernels and launches by the datasheet."""
        estimated = self.kernel_seconds + self.waiting_seconds
        return self.seconds / estimated if self.seconds else None

    def log_error(self, factor: float) -> float:
        """Logarithm of the published step over what is predicted with a factor over kernels."""
        value = self.seconds or math.nan
        return math.log(value / (factor * self.kernel_seconds + self.waiting_seconds))

    @property
    def left_free(self) -> float:
        """Share of the card."""
        return (
            1 - (self.prediction.training.run_memory_bytes + self.beside_bytes) / self.total_bytes
        )

    def line(self) -> str:
        row = self.row
        card = GPUS[row["gpu"]].removeprefix("nvidia-")
        text = f"{row['id']:>4} {NAMES[row['model']]:21} {card:14} {row['trainer']:36} "
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
        if self.time_error is None and seconds_of(row):
            text += f"  not timed, predicted {100 * self.left_free:+.0f}% left free"
        if self.time_error is not None:
            text += (
                f"  step {row['s_per_it']:>6} predicted {self.step_seconds:6.2f} "
                f"{100 * self.time_error:+6.1f}%"
            )
        return text


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


def report(title: str, rows: Sequence[Row], *, steps_alone: bool = False) -> list[Reading]:
    broken = {row["id"]: broken_rule(row, steps_alone=steps_alone) for row in rows}
    print(f"\n{title}: {len(rows)} rows\n")
    for reason, count in Counter(broken.values()).items():
        print(f"{reason or 'compared':44}{count:34}")
    readings = [predicted(row) for row in unique(row for row in rows if not broken[row["id"]])]
    print()
    for reading in readings:
        print(reading.line())
    print()
    for group, errors in sorted(errors_of(readings).items()):
        print(f"{group:44}{summary(errors):>34}")
    return readings


def report_factors(readings: Sequence[Reading]) -> None:
    """Published steps over their kernels, by program, and the errors that are left after one
    factor for each."""
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


def report_left_out(readings: Sequence[Reading]) -> None:
    """Errors of each program, family and card with the factor over kernels that all others have;
    and whether ranges from the others' errors, in sigmas of predictions, hold four fifths."""
    timed = [one for one in readings if one.over_kernels is not None]

    def sigmas(one: Reading, factor: float = STEP_OVER_KERNELS) -> float:
        return one.log_error(factor) / one.prediction.stated_time_uncertainty

    groups: dict[str, Callable[[Reading], str]] = {
        "program": lambda one: one.row["trainer"],
        "family": lambda one: NAMES[one.row["model"]],
        "card": lambda one: GPUS[one.row["gpu"]],
    }
    for what, group_of in groups.items():
        print(f"\nstep times, one {what} left out\n")
        found, held = [], 0
        for name in sorted(set(map(group_of, timed))):
            own = [one for one in timed if group_of(one) == name]
            others = [one for one in timed if group_of(one) != name]
            factor = statistics.median(one.over_kernels or 0.0 for one in others)
            low, high = quantiles([sigmas(one, factor) for one in others], 0.1, 0.9)
            held += sum(low <= sigmas(one, factor) <= high for one in own)
            errors = [math.expm1(-one.log_error(factor)) for one in own]
            print(f"{name:44}{summary(errors):>34}  {signed(errors)}")
            found += errors
        print(f"{'all':44}{summary(found):>34}  {signed(found)}")
        print(f"ranges of the others hold {held} of {len(found)}")
    sizes: dict[tuple[str, ...], float] = {}
    for one in readings:
        if one.memory_error is not None and one.row["status"] != "OOM":
            key = one.row["trainer"], one.row["model"], one.row["vram_value"]
            score = -math.log1p(one.memory_error) / one.prediction.memory_uncertainty
            sizes.setdefault(key, score)
    scores = {
        "times": ([sigmas(one) for one in timed], TIME_SIGMAS),
        "sizes": ([*sizes.values()], MEMORY_SIGMAS),
    }
    for what, (told, (low, high)) in scores.items():
        middle = ", ".join(f"{each:+.2f}" for each in quantiles(told, 0.1, 0.5, 0.9))
        held = sum(low <= each <= high for each in told)
        print(
            f"{what}: at 10, 50, 90% {middle} sigmas; the stated range holds {held} of {len(told)}"
        )


def report_plain(readings: Sequence[Reading]) -> None:
    """How far a plain estimate is off, and how often what was published lies in its range."""
    plain, seen = list[Reading](), set[tuple[str, ...]]()
    for row in (one.row for one in readings if one.row["status"] != "OOM"):
        same = row["trainer"], row["model"], row["vram_value"]
        changes = {"trainer": PLAIN, "targets": targets_of(row)}
        if same in seen:
            changes["vram_value"] = ""
        if row["source"] in ENCODES:
            changes["source"] = ""
        plain.append(predicted({**row, **changes}))
        seen.add(same)
    print("\nby a plain `autotune estimate`, whatever the program\n")
    limits = {"time": TIME_SIGMAS, "memory": MEMORY_SIGMAS}
    for what, (low, high) in limits.items():
        errors = [getattr(one, f"{what}_error") for one in plain]
        doubts = [
            one.prediction.stated_time_uncertainty
            if what == "time"
            else one.prediction.memory_uncertainty
            for one in plain
        ]
        told = [(e, d) for e, d in zip(errors, doubts, strict=True) if e is not None]
        held = sum(low <= -math.log1p(error) / doubt <= high for error, doubt in told)
        over = sum(-math.log1p(error) / doubt > high for error, doubt in told)
        found = [error for error, _ in told]
        print(f"{what:44}{summary(found):>34}  {signed(found)}")
        print(f"{'':44}the range holds {held} of {len(told)}, {over} are above it")


def quantiles(values: Iterable[float], *shares: float) -> list[float]:
    """The nearest values."""
    known = sorted(values)
    return [known[round(share * (len(known) - 1))] for share in shares]


def signed(errors: Sequence[float]) -> str:
    """Their median with its sign."""
    return f"signed {100 * statistics.median(errors):+.1f}%"


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
    data = Path(__file__).parent / "data"
    parser.add_argument("--csv", type=Path, default=data / "published_numbers.csv")
    parser.add_argument("--fresh", type=Path, nargs="*", default=[data / "fresh_readings.csv"])
    asked = [data / "readings_2026-11-25.csv"]
    parser.add_argument("--asked", type=Path, nargs="*", default=asked)
    arguments = parser.parse_args()
    published = rows_of(arguments.csv)
    readings = report("published numbers, older families", [*filter(is_older, published)])
    for path in (*arguments.fresh, *arguments.asked):
        readings += report(path.name, rows_of(path))
    report_factors(readings)
    later = [row for row in published if row["model"] in ADDED]
    groups: dict[str, set[str]] = {
        "families added later": ADDED.keys() - LATEST.keys() - NEWEST.keys(),
        "Qwen-Image 2.1": {*LATEST},
        "LTX-2.3": {*NEWEST},
    }
    for title, models in groups.items():
        found = report(title, [row for row in later if row["model"] in models])
        report_factors(found)
        readings += found
    steps = [{**row, "vram_value": ""} for row in later]
    plain = report("steps without checkpoints", steps, steps_alone=True)
    report_factors(plain)
    print("\nall of these")
    report_factors([*readings, *plain])
    report_left_out([*readings, *plain])
    report_plain([*readings, *plain])


if __name__ == "__main__":
    main()
