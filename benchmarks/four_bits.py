"""Weights in 4 bits: NormalFloat beside integers in groups, rotated and as they are.

    python benchmarks/four_bits.py RESULT.jsonl [--seeds 5] [--steps 150]

Only weights are stored so, hence a model with rounded weights computes the same. Errors are those
of weights, and of adapters' gradients in mid-size models; drawn weights are normal, or Student's t
with five degrees of freedom, whose tails are heavier. Then the demo's shape is taught on rounded
weights, with the same seeds as on exact ones (see `quality.py`). Scales of integers are fp16, each
the best of eleven.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).with_name("world")))
import quality
from eight_bits import mid_size, rotation_of_world
from teach import Classroom

from autotune.knobs import quantized_layers
from autotune.knobs.quantized_layers import pack_nf4, rotate
from autotune.plan.candidate import Candidate
from autotune.train import model as model_module

MODELS = ("qwen-image", "flux1-dev")
STORED = Candidate(
    micro_batch_size=1, checkpointed_blocks=0, precision="fp32", quantization="torchao-int8"
)
TAUGHT = ("nf4", "int4 by 64", "int4 by 64, rotated")


def nf4(weight: Tensor) -> Tensor:
    from bitsandbytes import functional as bits

    stored = pack_nf4(weight.clone(), 1 << 20)
    return bits.dequantize_4bit(stored.data, stored.quant_state).reshape(weight.shape).to(weight)


def int4(weight: Tensor, group: int, *, rotated: bool) -> Tensor:
    """Round to -8 to 7 times a scale for each `group` weights."""
    if rotated:
        rotation = quantized_layers.hadamard(weight)
        return rotate(int4(rotate(weight, rotation), group, rotated=False), rotation)
    flat = weight.flatten()
    rows = torch.cat([flat, flat.new_zeros(-len(flat) % group)]).view(-1, group)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    best, least = rows, torch.full_like(largest, torch.inf)
    for share in range(12, 23):
        scale = (largest * share / 20 / -8).half().float()
        scale = torch.where(scale == 0, 1.0, scale)
        rounded = (rows / scale).round().clamp(-8, 7) * scale
        error = (rounded - rows).square().sum(1, keepdim=True)
        best = torch.where(error < least, rounded, best)
        least = torch.minimum(error, least)
    return best.flatten()[: len(flat)].view(weight.shape)


FORMATS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "nf4": (4 + 8 / 64 + 32 / (64 * 256), nf4),
    "int4 by 64": (4.25, partial(int4, group=64, rotated=False)),
    "int4 by 32": (4.5, partial(int4, group=32, rotated=False)),
    "int4 by 64, rotated": (4.25, partial(int4, group=64, rotated=True)),
    "int4 by 128, rotated": (4.125, partial(int4, group=128, rotated=True)),
}
DRAWN: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "Student's t": lambda shape: torch.distributions.StudentT(5.0).sample(shape) / (5 / 3) ** 0.5,
}


def rounding(
    rounded: Callable[[Tensor], Tensor], draw: Callable[[tuple[int, ...]], Tensor] | None
) -> Callable[[nn.Linear], None]:
    """What gets each Linear."""
    if draw is not None:
        torch.manual_seed(0)

    def change(layer: nn.Linear) -> None:
        weight = layer.weight.data
        if draw is not None:
            weight = weight.std() * draw(tuple(weight.shape))
        layer.weight.data.copy_(rounded(weight))

    return change


def off(found: Tensor, wanted: Tensor) -> float:
    return round(float((found - wanted).norm() / wanted.norm()), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    layers: Any = quantized_layers
    training_model: Any = model_module
    training_model.require_quality = lambda *_: None  # nf4 is not let through here

    def write(row: dict[str, Any]) -> None:
        print(row, flush=True)
        with asked.result.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for drawn, draw in DRAWN.items():
        torch.manual_seed(0)
        weight = draw((1024, 3072))
        errors = {name: off(rounded(weight), weight) for name, (_, rounded) in FORMATS.items()}
        for name, (bits, _) in FORMATS.items():
            row = {"weights": drawn, "format": name, "bits": round(bits, 3)}
            write(row | {"weight_error": errors[name]})
        for model in MODELS:
            layers.quantize_int8 = rounding(lambda exact: exact, draw)
            wanted = mid_size(model, STORED)
            for name, (_, rounded) in FORMATS.items():
                layers.quantize_int8 = rounding(rounded, draw)
                row = {"model": model, "weights": drawn, "format": name}
                write(row | {"gradient_error": off(mid_size(model, STORED), wanted)})
    room, layers.hadamard = Classroom(), rotation_of_world
    for name in TAUGHT:
        quality.SETTINGS[name] = {"quantization": "torchao-int8"}
    for seed in range(asked.seeds):
        for name in ("reference", *TAUGHT):
            if name in FORMATS:
                layers.quantize_int8 = rounding(FORMATS[name][1], None)
            write(quality.run(room, name, seed, asked.steps))
    rows = [json.loads(line) for line in asked.result.read_text().splitlines()]
    print(quality.summarize([row for row in rows if "seed" in row]))


if __name__ == "__main__":
    main()
