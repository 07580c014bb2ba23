"""What entropy coding of int8 weights would be worth.

    python benchmarks/compression.py RESULT.jsonl [MODEL ...]

Ratios: Shannon's entropy of int8 weights with a scale for each row, as we store them, and with one
scale for the matrix, as OneTrainer's pull request #1630 does; of the demo's trained weights and of
a normal distribution as wide as FLUX.1. Decoding is Huffman's by zlib, on one core.

Worth: the plan for a card with as much more memory as coding would save, plus what decoding takes:
each weight twice for each micro-batch, at half of the card's memory bandwidth.
"""

import json
import sys
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from autotune.demo.lesson import SMALL_WORLD
from autotune.errors import AutotuneError
from autotune.machine.catalog import gpu_named, profile_of_gpu
from autotune.plan.request import PlanRequest
from autotune.plan.workload import Quality
from autotune.search.planner import make_plan

MODELS = ("qwen-image", "flux2-dev", "wan-2.1-14b", "minimax-h3")
CARDS = ("rtx-3060", "rtx-4060-ti-16gb", "rtx-4080", "rtx-4090")
RATIOS = {"as we store them": 0.9, "published, one scale a matrix": 0.53}
DECODES = 2
BANDWIDTH_SHARE = 0.5


def quantized(weight: Tensor, *, by_row: bool) -> Tensor:
    largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()
    scale = largest.clamp(min=1e-12) / 127
    return (weight / scale).round().to(torch.int8)


def entropy_bits(values: Tensor) -> float:
    counts = torch.bincount(values.flatten().int() + 128, minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


def ratios() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    stored = load_file(next(SMALL_WORLD.glob("transformer/*.safetensors")))
    trained = [each.float() for each in stored.values() if each.ndim == 2 and len(each) > 64]
    rows = []
    for weights, matrices in {
        "demo's transformer": trained,
        "normal, 3,072 wide": [torch.randn(3072, 3072)],
    }.items():
        for scale in ("row", "matrix"):
            stored_as = [quantized(each, by_row=scale == "row") for each in matrices]
            size = sum(each.numel() for each in stored_as)
            bits = sum(entropy_bits(each) * each.numel() for each in stored_as) / size
            plain = b"".join(each.numpy().tobytes() for each in stored_as)
            coder = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
            coded = coder.compress(plain) + coder.flush()
            begin = time.process_time()
            zlib.decompress(coded)
            seconds = time.process_time() - begin
            rows.append(
                {
                    "weights": weights,
                    "a scale for each": scale,
                    "entropy_bits": round(bits, 2),
                    "huffman_ratio": round(len(coded) / len(plain), 3),
                    "decoded_mb_per_second": round(len(plain) / seconds / 1e6),
                }
            )
    return rows


def worth(model: str, card: str, floor: Quality) -> dict[str, Any]:
    asked = {"model": model, "hardware": card, "quality": floor, "on_event": lambda _: None}
    request = PlanRequest.model_validate(asked)
    gpu = gpu_named(card)
    bandwidth = gpu.datasheet.memory_bytes_per_second
    assert bandwidth is not None
    usual = profile_of_gpu(gpu)
    row: dict[str, Any] = {"model": model, "card": card, "floor": floor}

    def planned(extra_bytes: int) -> Any:
        device = usual.device
        larger = {
            name: (getattr(device, name) or 0) + extra_bytes
            for name in ("total_memory_bytes", "free_memory_bytes", "budget_bytes")
        }
        try:
            profile = usual.changed(device=device.changed(**larger))
            return make_plan(request, profile, lambda _: None).plan.frozen
        except AutotuneError as error:
            return error

    def told(frozen: Any) -> dict[str, Any]:
        if isinstance(frozen, AutotuneError):
            return {"fits": False, "why": str(frozen)[:200]}
        settings = frozen.settings
        return {
            "step_seconds": round(frozen.expected.step_seconds, 3),
            "quantization": settings.quantization,
            "swapped_blocks": settings.swapped_blocks,
        }

    now = planned(0)
    row["now"] = told(now)
    known = planned(80 << 30) if isinstance(now, AutotuneError) else now
    parameters = known.workload.model.num_parameters
    for name, ratio in RATIOS.items():
        coded = planned(int((1 - ratio) * parameters))
        row[name] = told(coded)
        if "step_seconds" in row[name] and "int8" in row[name]["quantization"]:
            batches = coded.workload.effective_batch_size // coded.settings.micro_batch_size
            moved = DECODES * batches * parameters * (1 + ratio)
            decoding = moved / (BANDWIDTH_SHARE * bandwidth)
            row[name]["step_seconds"] = round(row[name]["step_seconds"] + decoding, 3)
            row[name]["decoding_seconds"] = round(decoding, 3)
    return row


def main() -> None:
    path, *models = sys.argv[1:]
    with Path(path).open("a") as file:
        for row in ratios():
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")
        for model in models or MODELS:
            for floor in get_args(Quality)[1:]:
                for card in CARDS:
                    row = worth(model, card, floor)
                    print(row, flush=True)
                    file.write(json.dumps(row) + "\n")
                    file.flush()
        file.write(json.dumps({"date": f"{datetime.now(UTC):%Y-%m-%d}"}) + "\n")


if __name__ == "__main__":
    main()
