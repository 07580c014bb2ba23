"""How wrong adapters' gradients are with products in 8 bits, rotated and as they are.

    python benchmarks/eight_bits.py RESULT.jsonl [--time]

The reference is the same model in fp32 with unquantized weights. Outliers are some channels of each
layer's input that are multiplied by a number, and their weights divided by it, in the reference,
too: a model computes what it did before. Their sizes span what is published: 14.5 in FLUX.1's
`proj_out` (arXiv:2512.03673), 26 times a row's RMS (a channel of Qwen2.5, paiml/aprender#2095), and
100 beside it. Weights of mid-size models are drawn from a normal distribution, since torch's
uniform one is kinder to 8 bits than any that was trained. `--time` measures instead what rotating
adds to a step of one to three blocks as wide as published ones, on a CPU that multiplies in int8.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).with_name("world")))
from configs import MID
from cost_accuracy import workload_of
from cpu_truth import batches, build
from teach import CPU, Classroom, Job

from autotune.knobs import quantized_layers
from autotune.models.family import Batch, Family
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Bucket, WorkloadRequest
from autotune.train import model as model_module
from autotune.train.model import load_model
from autotune.train.step import Noising
from autotune.train.workload import describe_workload

OUTLIERS = {"none": (0, 1.0), "1 of 14.5": (1, 14.5), "4 of 26": (4, 26.0), "1 of 100": (1, 100.0)}
WORLD = "small world"
FUNCTIONS = ("multiply_in_int8", "quantize_int8", "quantize_float8")
# What is measured, by the name of its format; the first, which leaves layers as they are, is what
# the others are compared with.
SETTINGS = {"reference": "torchao-int8", "int8 as it is": "int8-rotated"} | {
    name: name for name in ("int8-rotated", "torchao-int8", "torchao-fp8")
}


def with_outliers(quantize: Any, count: int, size: float, *, is_drawn: bool = False) -> Any:
    """What gets each Linear, and makes channels of its input large, and their weights as much
    smaller: it computes the same as long as nothing is rounded."""
    generator = torch.Generator().manual_seed(0)

    def change(layer: nn.Linear) -> Any:
        factors = torch.ones(layer.in_features)
        factors[torch.randperm(layer.in_features, generator=generator)[:count]] = size
        if is_drawn:
            shape, std = layer.weight.shape, float(layer.weight.std())
            layer.weight.data.copy_(std * torch.randn(shape, generator=generator))
        layer.weight.data /= factors
        layer.register_forward_pre_hook(lambda _, given: (given[0] * factors,))
        return quantize(layer)

    return change


def gradients(family: Family, transformer: Any, adapter: Sequence[Tensor], batch: Batch) -> Tensor:
    """Gradients of all weights of an adapter that has learned something."""
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter:
        std = 0.5 / math.sqrt(parameter.shape[-1])
        parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator))
    loss = Noising(0, 1.0).loss(family, transformer, batch, 0, 0)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, adapter)])


def mid_size(name: str, candidate: Candidate) -> Tensor:
    family, config, workload = FAMILIES[name], MID[name], workload_of(name)
    transformer, adapter = build(family, config, workload, candidate)
    batch = batches(family, config, workload, candidate)[0]
    return gradients(family, transformer, adapter, batch)


def small_world(room: Classroom, candidate: Candidate) -> Tensor:
    wishes = WorkloadRequest(resolution=(64, 64), rank=16, quality="compact")
    model = load_model(
        room.resolved, describe_workload(room.resolved, None, wishes), candidate, CPU, 0
    )
    images = room.images(Job(own=8))[:4]
    batch = {name: torch.stack([one[name] for one in images]) for name in images[0]}
    return gradients(room.family, model.transformer, model.adapter, batch)


def rotation_of_world(like: Tensor) -> Tensor:
    """A block of 60 columns (Paley's second construction, from the squares modulo 29): the small
    world's layers are 120 and 480 wide, where powers of two leave blocks of 8."""
    squares, size = {number**2 % 29 for number in range(1, 29)}, 30
    conference = torch.ones(size, size)
    for row in range(29):
        for column in range(29):
            conference[row + 1, column + 1] = 1 if (row - column) % 29 in squares else -1
    conference.fill_diagonal_(0)
    apart = torch.kron(conference, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    within = torch.kron(torch.eye(size), torch.tensor([[1.0, -1.0], [-1.0, -1.0]]))
    return (apart + within).to(like) / 60**0.5


WIDE = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)}
FEW = {"qwen-image": {"num_layers": 1}, "flux1-dev": {"num_layers": 1, "num_single_layers": 2}}


def step_seconds(name: str, side_px: int = 512) -> dict[str, float]:
    """Time forward and backward passes of a micro-batch, rotated and not in turn: the least of
    seven of each, of the process on its core."""
    family, config = FAMILIES[name], {**MID[name], **WIDE, **FEW[name]}
    bucket = Bucket(width_px=side_px, height_px=side_px, num_frames=1, num_items=20)
    work = workload_of(name).changed(resolution_px=side_px, buckets=(bucket,), rank=16)
    layers: Any = quantized_layers
    candidate = Candidate(
        micro_batch_size=1, checkpointed_blocks=0, precision="fp32", quantization="int8-rotated"
    )
    rotation, models = layers.hadamard, {}
    for setting, how in {"as it is": lambda like: None, "rotated": rotation}.items():
        layers.hadamard = how
        transformer, adapter = build(family, config, work, candidate)
        models[setting] = transformer, adapter, batches(family, config, work, candidate)[0]
    layers.hadamard = rotation
    found = dict.fromkeys(models, math.inf)
    for _ in range(7):
        for setting, (transformer, adapter, batch) in models.items():
            begin = time.process_time()
            loss = Noising(0, 1.0).loss(family, transformer, batch, 0, 0)
            torch.autograd.grad(loss, adapter)
            found[setting] = min(found[setting], time.process_time() - begin)
    return found


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in int8 by way of fp32: a CPU without VNNI takes twenty times as long otherwise."""
    return (left.float() @ right.float()).to(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--time", action="store_true")
    asked = parser.parse_args()
    path = asked.result
    torch.set_num_threads(1)
    for name in FEW if asked.time else ():
        timed = {"model": name, "step_seconds": step_seconds(name)}
        print(timed, flush=True)
        with path.open("a") as file:
            file.write(json.dumps(timed) + "\n")
    if asked.time:
        return
    layers: Any = quantized_layers
    training_model: Any = model_module
    training_model.require_quality = lambda *_: None  # some of this would not be let through
    library: Any = torch
    library._int_mm = exact_product
    layers.SIDE_MULTIPLE = 8  # layers of the small world are 120 wide
    rotations = {WORLD: rotation_of_world}
    functions = {name: getattr(layers, name) for name in FUNCTIONS}
    hadamard, room = layers.hadamard, Classroom()
    for model in (WORLD, "qwen-image", "flux1-dev"):
        for outliers, (count, size) in OUTLIERS.items():
            wanted: Tensor | None = None
            for setting, storage in SETTINGS.items():
                rotates = setting != "int8 as it is"
                rotation = rotations.get(model, hadamard)
                layers.hadamard = rotation if rotates else (lambda like: like.new_ones(1, 1))
                for name, function in functions.items():
                    made = (lambda layer: None) if wanted is None else function
                    changed = with_outliers(made, count, size, is_drawn=model != WORLD)
                    setattr(layers, name, changed)
                candidate = Candidate(
                    micro_batch_size=1, checkpointed_blocks=0, precision="fp32",
                    quantization=storage,
                )  # fmt: skip
                found = (
                    small_world(room, candidate) if model == WORLD else mid_size(model, candidate)
                )
                if wanted is None:
                    wanted = found
                    continue
                row: dict[str, Any] = {"model": model, "outliers": outliers, "setting": setting}
                row["gradient_error"] = round(float((found - wanted).norm() / wanted.norm()), 5)
                print(row, flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
