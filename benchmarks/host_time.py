"""Seconds that the host takes for a step, against what the cost model counts.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"), whose kernels do
nothing, so that a step takes what Python, dispatch and launches take:

    FAKEGPU=h100 FAKEGPU_COPIES=0 tests/fakegpu/run benchmarks/host_time.py [MODEL...]

A line has the process's own seconds of a forward and backward pass at 1,024 px and batch 1, the
least of three; of a bare operation in the same minute, as the probe measures it; and the
operations that a trace counts. The bare operation swings by half: take the least of all lines.
Models but SDXL have few blocks: the ratio is the same.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.cost.predict import CostModel, choice_of
from autotune.knobs.blocks import apply_recomputation
from autotune.machine.catalog import gpu_named, profile_of_gpu
from autotune.models.adapter import add_adapter
from autotune.models.family import build_on_meta, denoising_loss
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.train.workload import describe_workload
from autotune.weights.stream import cast_as_loaded

SHORT: dict[str, dict[str, int]] = {
    "sdxl": {},
    "flux1-dev": {"num_layers": 3, "num_single_layers": 4},
    "krea-2": {"num_layers": 4},
    "z-image": {"n_layers": 4},
}
LINKS = 100


def least_seconds(work: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(1 + times):  # the first is slower
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found[1:])


def bare_seconds() -> float:
    layers = [nn.Linear(16, 16, bias=False), nn.GELU()] * LINKS
    chain = nn.Sequential(*layers).requires_grad_(False).to("cuda")
    start, gradient = (torch.ones(1, 16, device="cuda") for _ in range(2))
    start.requires_grad_()
    return least_seconds(lambda: torch.autograd.grad(chain(start), start, gradient), 20) / (
        4 * LINKS
    )


def measure(name: str) -> None:
    model = resolve_model(ModelRef.of(name))
    family, config = model.family, {**model.config, **SHORT[name]}
    targets = "attention+mlp+proj" if name == "sdxl" else "all-linear"
    asked = WorkloadRequest(
        rank=16, resolution=(1024, 1024), effective_batch_size=1, targets=targets
    )
    work = describe_workload(model, None, asked)
    transformer = build_on_meta(family, config)
    cast_as_loaded(transformer, torch.bfloat16)
    transformer.to_empty(device="cuda").requires_grad_(False)
    add_adapter(family, transformer, work, torch.bfloat16)
    transformer.to("cuda").train()
    num_blocks = len(family.blocks(transformer))
    work = work.changed(model=work.model.changed(num_blocks=num_blocks))
    shapes = family.sample_shapes(config, work.largest_bucket, work.max_text_tokens, 0)
    sample = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    batch = {key: tensor.to("cuda") for key, tensor in family.collate([sample]).items()}
    noise, levels = torch.empty_like(batch["latents"]), torch.rand(1, device="cuda")
    cost = CostModel.build(profile_of_gpu(gpu_named("nvidia-h100-sxm")), work, family, config)

    def step() -> None:
        denoising_loss(family, transformer, batch, noise, levels).backward()

    for checkpointed in (0, num_blocks):
        apply_recomputation(transformer, family, checkpointed, 0)
        candidate = Candidate(micro_batch_size=1, checkpointed_blocks=checkpointed)
        passes = cost.tables.passes(
            choice_of(candidate), np.array([[checkpointed, 0, 0]]), accumulates=False
        )
        row = {
            "model": name,
            "blocks": num_blocks,
            "checkpointed_blocks": checkpointed,
            "host_seconds": round(least_seconds(step, 3), 4),
            "bare_operation_seconds": round(bare_seconds(), 7),
            "counted": float(passes.work[0, -1]),
            "counted_again": float(passes.recompute[0, -1]),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or SHORT:
        measure(each)
