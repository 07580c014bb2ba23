"""Kernels of one block, forward and backward: launches, bytes, registers, and the host's seconds.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"), whose kernels do
nothing: Inductor and Triton compile for the card that it names.

    FAKEGPU_COPIES=0 tests/fakegpu/run benchmarks/kernels.py ROWS.jsonl [MODEL...]

A process takes one kind of block of full width at 1,024 px on one card, and gives a line for each
setting; processes that the file has lines of are left out. `made` are kernels that Inductor makes,
with its own estimate of their bytes, `counted` what the cost model counts for the block without
compiling. Lines of kind `buckets` have the graphs and seconds of compiling for five buckets and ten
lengths of captions each. All take half an hour of a core.
"""

import ctypes
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor.graph import GraphLowering

from autotune.cost.predict import CostModel, choice_of
from autotune.machine.probe import probe
from autotune.models.adapter import add_adapter
from autotune.models.facts import Config
from autotune.models.family import Family, denoising_loss
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload, WorkloadRequest
from autotune.train.model import apply_knobs
from autotune.train.workload import describe_workload
from autotune.weights.empty import build_empty
from autotune.weights.stream import fill_random, from_pretrained_dtypes

CARDS = {"h100": "sm_90", "4090": "sm_89", "a100": "sm_80", "5090": "sm_120"}
# Blocks that are built, and the second of each kind: the first needs no gradient of its input.
MODELS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "z-image": ({"n_layers": 3}, {"layer": 5}),
    "flux1-dev": ({"num_layers": 2, "num_single_layers": 2}, {"double": 1, "single": 3}),
    "qwen-image": ({"num_layers": 2}, {"block": 1}),
}
COMPILED: tuple[dict[str, Any], ...] = ({"norm_rope": "compiled"}, {"compile": "block"})
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"norm_rope": "fused"},
    *COMPILED,
    {"selective_blocks": 99},
    {"checkpointed_blocks": 99},
    {"checkpointed_blocks": 99, "compile": "block"},
)
BUCKETS = ((1024, 1024), (832, 1216), (1216, 832), (896, 1152), (1152, 896))
CAPTIONS = range(40, 240, 20)  # tokens
COUNTERS = ("launches", "products", "executions", "generated_launches")
CUOBJDUMP = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"


@dataclass
class Bench:
    """A model of few blocks on the device, with an adapter."""

    family: Family
    config: Config
    work: Workload
    transformer: Any

    @classmethod
    def build(cls, name: str) -> "Bench":
        model = resolve_model(ModelRef.of(name))
        family, config = model.family, {**model.config, **MODELS[name][0]}
        asked: Any = {"rank": 16, "resolution": (1024, 1024), "targets": "attention+mlp"}
        work = describe_workload(model, None, WorkloadRequest(effective_batch_size=1, **asked))
        dtype = torch.bfloat16
        transformer = build_empty(lambda: family.build_transformer(config), dtype=dtype)
        policy = from_pretrained_dtypes(transformer, dtype)
        fill_random(transformer, device="cuda", seed=0, dtype_policy=policy)
        transformer.requires_grad_(False)
        add_adapter(family, transformer, work, dtype)
        transformer.to("cuda").train()
        num_blocks = len(family.blocks(transformer))
        work = work.changed(model=work.model.changed(num_blocks=num_blocks))
        return cls(family, config, work, transformer)

    def loss(self, size: tuple[int, int], text_tokens: int) -> torch.Tensor:
        bucket = self.work.largest_bucket.changed(width_px=size[0], height_px=size[1])
        shapes = self.family.sample_shapes(self.config, bucket, text_tokens, 0)
        sample = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        batch = {key: tensor.to("cuda") for key, tensor in self.family.collate([sample]).items()}
        noise, levels = torch.empty_like(batch["latents"]), torch.rand(1, device="cuda")
        return denoising_loss(self.family, self.transformer, batch, noise, levels)

    def apply(self, settings: dict[str, Any]) -> Candidate:
        usual = {"micro_batch_size": 1, "checkpointed_blocks": 0}
        candidate = Candidate.model_validate(usual | settings)
        apply_knobs(self.family, self.transformer, candidate, needs_reload=False)
        torch._dynamo.reset()
        return candidate

    def inputs(self, block: Any) -> list[Any]:
        """Catch what a block gets in a forward pass."""
        given: list[Any] = []
        hook = block.register_forward_pre_hook(lambda _, *all: given.append(all), with_kwargs=True)
        self.loss((1024, 1024), self.work.max_text_tokens)
        hook.remove()
        args, named = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), given[0]
        )
        bound = inspect.signature(block.forward).bind(*args, **named)
        bound.apply_defaults()
        return list(bound.args)  # checkpoints take no names


def compile_buckets(bench: Bench) -> Iterator[dict[str, Any]]:
    def run_shapes() -> None:
        for size in BUCKETS:
            for text_tokens in CAPTIONS:
                bench.loss(size, text_tokens).backward()  # type: ignore[no-untyped-call]

    bench.apply({})
    run_shapes()
    plain = process_seconds(run_shapes)
    graphs = torch._dynamo.utils.counters["stats"]
    for settings in COMPILED:
        bench.apply(settings)
        before = graphs["unique_graphs"]
        seconds = process_seconds(run_shapes) - plain
        found = {"graphs": graphs["unique_graphs"] - before, "compile_seconds": round(seconds, 1)}
        yield settings | found


def measure_block(bench: Bench, at: int) -> Iterator[dict[str, Any]]:
    block = bench.family.blocks(bench.transformer)[at]
    inputs, made, cubins = bench.inputs(block), note_made(), set[Path]()
    cost = CostModel.build(probe(), bench.work, bench.family, bench.config)
    for settings in SETTINGS:
        candidate = bench.apply(settings)
        run: Any = block
        if candidate.recomputed_blocks:
            run = partial(bench.transformer._gradient_checkpointing_func, block)
        step = partial(pass_through, bench.transformer, run, inputs)
        made.clear()
        first = process_seconds(step)
        step()
        before = stand_in_counts()
        step()
        counts = [b - a for a, b in zip(before, stand_in_counts(), strict=True)]
        launches = {"launches": sum(counts[:3]), "products": counts[1], "made": counts[3]}
        # In turn, as a busy machine is slower at times.
        seconds: tuple[list[float], ...] = ([], [])
        code = block._compiled_call_impl
        for turn in range(60):
            block._compiled_call_impl = code if turn % 2 else None
            seconds[turn % 2].append(process_seconds(step))
        plain, own = (round(min(each), 6) for each in seconds)
        row = {"first_seconds": round(first, 1), "plain_host_seconds": plain, "host_seconds": own}
        rates = cost.tables.rates_of(choice_of(candidate))
        if made:
            row["made_bytes"] = sum(made)
            row["made_seconds"] = sum(rates.seconds(("elementwise", (), 0, each)) for each in made)
            known = set(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.cubin"))
            row |= registers_in(known - cubins)
            cubins = known
        yield settings | launches | row | count_as_predicted(cost, candidate, at)


def note_made() -> list[int]:
    """Let Inductor note the bytes of each kernel that it makes from now on."""
    plain, made = GraphLowering.codegen, list[int]()

    def codegen(graph: Any) -> Any:
        code = plain(graph)
        nodes = (node for node in graph.scheduler.nodes if not node.is_extern())
        made.extend(filter(None, (node.get_read_write_buffers_sizes() for node in nodes)))
        return code

    GraphLowering.codegen = codegen  # type: ignore[method-assign, assignment]
    return made


def pass_through(transformer: Any, run: Callable[..., Any], inputs: list[Any]) -> None:
    transformer.zero_grad()
    leaves = torch.utils._pytree.tree_leaves(run(*inputs))
    outs = [each for each in leaves if each.requires_grad]
    torch.autograd.backward(outs, [torch.empty_like(each) for each in outs])


def process_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def stand_in_counts() -> list[int]:
    count = ctypes.CDLL(None).fakegpu_count
    count.restype = ctypes.c_int64
    return [count(name.encode()) for name in COUNTERS]


def registers_in(cubins: set[Path]) -> dict[str, int]:
    found = []
    for cubin in cubins:
        told = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, check=True)
        words = told.stdout.decode().split("Function")[1].split()[1:]
        usage = dict(pair.split(":") for pair in words)
        found.append((int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])))
    return {
        "variants": len(found),  # between which a card chooses by trying them
        "variants_that_spill": sum(spilled > 0 for _, spilled in found),
        "max_registers": max((used for used, _ in found), default=0),
        "max_spilled_bytes": max((spilled for _, spilled in found), default=0),
    }


def count_as_predicted(cost: CostModel, candidate: Candidate, at: int) -> dict[str, float]:
    rates, again = cost.tables.rates_of(choice_of(candidate)), candidate.recomputed_blocks
    keeps = candidate.selective_blocks > 0
    num_blocks = cost.model.num_blocks if again else 0
    traced = cost.tables._trace(choice_of(candidate), 1, num_blocks, keeps_attention=keeps)
    counted = Counter(traced.forward[at].work)
    counted.update(traced.backward[at].work)
    of_memory = {each: n for each, n in counted.items() if each[0].startswith("elementwise")}
    return {
        "counted_launches": sum(n for each, n in counted.items() if each[0] != "module"),
        "counted_bytes": sum(each[3] * n for each, n in of_memory.items()),
        "counted_seconds": sum(rates.seconds(each) * n for each, n in of_memory.items()),
    }


def run_process(card: str, name: str, kind: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--rows", name, kind]
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ | {"FAKEGPU": card, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    key = {"arch": CARDS[card], "model": name, "kind": kind}
    return (key | json.loads(line) for line in done.stdout.splitlines() if line[0] == "{")


def main() -> None:
    if sys.argv[1] == "--rows":
        name, kind = sys.argv[2:]
        bench = Bench.build(name)
        is_block = kind != "buckets"
        for row in (
            measure_block(bench, MODELS[name][1][kind]) if is_block else compile_buckets(bench)
        ):
            sys.stdout.write(json.dumps(row) + "\n")
        return
    file, names = Path(sys.argv[1]), sys.argv[2:] or MODELS
    lines = file.read_text().splitlines() if file.exists() else []
    known = {(row["arch"], row["model"], row["kind"]) for row in map(json.loads, lines)}
    for card, arch in CARDS.items():
        for name in names:
            for kind in (*MODELS[name][1], *(["buckets"] if card == "h100" else [])):
                if (arch, name, kind) not in known:
                    rows = list(run_process(card, name, kind))
                    with file.open("a") as results:
                        results.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
