"""Predictions equal the real model to the byte; where kernels decide, nearly."""

import os
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from tiny_models import TINY, cpu, gpu, workload_of

from autotune.cost.predict import CostModel
from autotune.cost.timing import Rates
from autotune.cost.trace import BlockTables, choose_traced, compose, shorten, table_of
from autotune.cost.traced_model import TracedModel, one_at_a_time, working_ahead
from autotune.knobs import modulation
from autotune.knobs.blocks import BlockSwap
from autotune.models.facts import Parts
from autotune.models.family import denoising_loss
from autotune.models.noise import DiscreteDiffusion
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.workload import OptimizerChoice
from autotune.train.optimizer import AdapterOptimizer
from benchmarks.cpu_truth import batches, build, read_parts, run, storage_bytes
from tests.builders import BITSANDBYTES, OLD_TORCH

TABLES = yaml.safe_load((Path(__file__).parent / "exactness.yaml").read_text())


def marked(row):
    marks = {"bnb-nf4": BITSANDBYTES, "fp8-matmul": OLD_TORCH}
    return pytest.param(*row, marks=[marks[each] for each in marks.keys() & {*row}])


PLAIN = [(name, "none") for name in TINY]
LAYOUTS = [name for name in TINY if FAMILIES[name].attention_layouts]


def candidate_of(precision, quantization="none", k=0, size=2, **others):
    values = {"precision": precision, "quantization": quantization, **others}
    return Candidate(micro_batch_size=size, checkpointed_blocks=k, **values)


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize(("name", "quantization"), map(marked, [*PLAIN, *TABLES["STORED"]]))
def test_what_stays_is_exact(predictor, name, quantization):
    own, family = predictor(name), FAMILIES[name]
    candidate = candidate_of("bf16", quantization)
    transformer, parameters = build(family, TINY[name], own.workload, candidate)
    optimizer = AdapterOptimizer(
        parameters, learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0
    )
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [t for state in optimizer.inner.state.values() for t in state.values()]
    masters = [m for m, p in zip(optimizer.masters, parameters, strict=True) if m is not p]
    model_bytes = own.model.model_bytes("bf16", quantization)
    frozen = [p for p in transformer.parameters() if not p.requires_grad]
    assert model_bytes.weight_bytes == storage_bytes(frozen)
    assert model_bytes.adapter_bytes == storage_bytes(parameters)
    assert model_bytes.adapter_parameters == sum(p.numel() for p in parameters)
    resident = own.resident_of(candidate)
    assert resident.optimizer_bytes == storage_bytes([*states, *masters])
    if quantization == "bnb-nf4":  # which is not swapped
        return
    swap = BlockSwap(family.blocks(transformer), torch.device("cpu"))
    assert tuple(block.region.num_bytes for block in swap.blocks) == model_bytes.block_pinned_bytes
    whole, bare = sum(model_bytes.block_pinned_bytes), sum(model_bytes.block_weight_bytes)
    # Scales of tiny layers are tiny, too.
    assert bare <= whole <= (1.03 if quantization != "none" else 1.02) * bare


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize(
    ("name", "quantization", "norm_rope"),
    [
        *(marked((*row, "stock")) for row in [*PLAIN, *TABLES["STORED"]]),
        *((name, "none", "fused") for name in LAYOUTS),
    ],
)
def test_bytes_saved_for_backward_are_exact(predictor, name, quantization, norm_rope):
    own, family = predictor(name), FAMILIES[name]
    candidate = candidate_of("fp32", quantization, norm_rope=norm_rope)
    transformer, _ = build(family, TINY[name], own.workload, candidate)
    batch = batches(family, TINY[name], own.workload, candidate_of("fp32"))[0]
    noise, sigmas = torch.randn_like(batch["latents"]), torch.rand(2)
    shorten(family, transformer, own.model.picked)
    known = {
        t.untyped_storage()._cdata for t in (*batch.values(), noise, sigmas, *_plain(transformer))
    }
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        return tensor

    denoising_loss(family, transformer, batch, noise, sigmas)  # fills caches of positions
    known |= set(_live_caches(transformer))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = denoising_loss(family, transformer, batch, noise, sigmas)
    unseen = (*_kept_by_nodes(loss.grad_fn), *_rotary_tables(transformer))
    saved |= {t.untyped_storage()._cdata: weakref.ref(t.untyped_storage()) for t in unseen}
    # Of a branch that nothing uses, such as the text stream's end, what was saved is gone again.
    alive = {key: storage() for key, storage in saved.items() if key not in known}
    expected = sum(storage.nbytes() for storage in alive.values() if storage is not None)
    # A first pass, not remembered, fills the modules' caches of positions.
    own.model.traced.__wrapped__("fp32", quantization, "cpu", 2, 0, norm_rope=norm_rope)
    traced = own.model.traced("fp32", quantization, "cpu", 2, 0, norm_rope=norm_rope)
    assert traced.saved_bytes - loss.nbytes == expected


def _plain(transformer):
    return (
        part
        for tensor in (*transformer.parameters(), *transformer.buffers())
        for part in read_parts(tensor)
    )


def _kept_by_nodes(root):
    """What bitsandbytes' products, and norm and RoPE, keep as plain attributes, which no hook
    sees."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            tables = node.how[1] if hasattr(node, "how") else ()
            yield from (
                t for t in (*getattr(node, "tensors", ()), *tables) if isinstance(t, torch.Tensor)
            )


def _rotary_tables(transformer):
    for module in transformer.modules():
        if tables := getattr(getattr(module, "processor", None), "tables", None):
            yield tables.key[0]


def _live_caches(transformer):
    for module in transformer.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage()._cdata


PEAKS = [
    *((name, 0.5, 0.0, "none", "stock") for name in TINY if name not in ("qwen-image", "wan-2.2")),
    *map(marked, TABLES["PEAKS"]),
    *((name, share, 0.0, "none", "fused") for name in LAYOUTS for share in (0.0, 0.5)),
]
"""Family, shares of blocks that recompute everything and all but attention, storage, kernels."""


def peaks_agree(own, candidate):
    config = TINY[own.family.name]
    truth = run(own.family, config, own.workload, candidate, num_timed=0)
    predicted = own.predict(candidate).allocated_memory_bytes
    return predicted == pytest.approx(truth.peak_bytes, rel=0.01)


@pytest.mark.quick(
    ("qwen-image", 1.0, "none", "stock"),
    ("flux1-dev", 0.5, 0.0, "none", "stock"),
    ("qwen-image", "fp8-matmul"),
    ("qwen-image", "bnb-nf4"),
    ("qwen-image", 0.5, "fused"),
)
@pytest.mark.parametrize(("name", "whole", "selective", "quantization", "norm_rope"), PEAKS)
def test_peak_is_the_profilers(predictor, name, whole, selective, quantization, norm_rope):
    own = predictor(name)
    last = own.workload.model.num_blocks - 1
    how = {"k": round(whole * last), "size": own.family.max_micro_batch_size or 2}
    candidate = candidate_of("fp32", quantization, norm_rope=norm_rope, **how)
    assert peaks_agree(own, candidate.changed(selective_blocks=round(selective * last)))


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize(("name", "changes", "k"), TABLES["CHANGES"])
def test_user_adapters_and_optimizers_are_predicted(predictor, name, changes, k):
    plain = predictor(name)
    if "optimizer" in changes:
        changes = {**changes, "optimizer": OptimizerChoice(**changes["optimizer"])}
    work = plain.workload.changed(**changes)
    own = CostModel.build(cpu(), work, plain.family, TINY[name])
    candidate = candidate_of("fp32", k=k, size=own.family.max_micro_batch_size or 2)
    assert peaks_agree(own, candidate)
    usual = plain.predict(candidate).allocated_memory_bytes
    assert own.predict(candidate).allocated_memory_bytes != usual


@pytest.mark.quick(("qwen-image", 1.0))
@pytest.mark.parametrize(("name", "share", "size"), TABLES["AHEAD"])
def test_modulation_ahead_is_exact(name, share, size, monkeypatch):
    monkeypatch.setattr(modulation, "MAX_WINDOW_DRAWS", 4)
    family, work = FAMILIES[name], workload_of(name)
    own = CostModel.build(cpu(), work, family, TINY[name])
    k = round(share * (work.model.num_blocks - 1))
    candidate = candidate_of("fp32", k=k, size=size, modulation="ahead")
    assert peaks_agree(own, candidate)
    transformer, _ = build(family, TINY[name], work, candidate)
    model_bytes = own.model.model_bytes("fp32", "none", "ahead")
    frozen = [p for p in transformer.parameters() if not p.requires_grad]
    assert model_bytes.weight_bytes == storage_bytes(frozen)
    whole = own.model.model_bytes("fp32", "none")
    assert whole.weight_bytes - model_bytes.weight_bytes == model_bytes.modulation.weight_bytes


@pytest.mark.quick(("qwen-image", "2-6"))
@pytest.mark.parametrize(("name", "rules", "adapted"), TABLES["DEEP"])
def test_short_traces_predict_deep_models(name, rules, adapted, monkeypatch):
    config = {**TINY[name], **TABLES["DEPTHS"][name]}
    workload = workload_of(name, config=config).changed(adapted_blocks=adapted)
    rates = Rates(cpu() if rules == "cpu" else gpu("nvidia-l4"), "fp32", "native", "cpu")
    short = TracedModel(FAMILIES[name], config, workload, rules, Parts(), None, ("", name))
    monkeypatch.setattr("autotune.cost.trace.TRACED_BLOCKS", 99)
    full = TracedModel(FAMILIES[name], config, workload, rules, Parts(), None, ("", name))
    kernel = "cpu" if rules == "cpu" else "flash"

    def peak(model, k, modes):
        tables = [table_of(model.traced("fp32", "none", kernel, 2, c), rates, 4) for c in modes]
        plain, mixed = (table.stretched(model.index) for table in tables)
        grads = np.array(model.model_bytes("fp32", "none").block_adapter_bytes, dtype=float)
        blocks = BlockTables([plain, plain, mixed], grads, np.zeros(len(grads)))
        return compose(blocks, np.array([[k, 0, 0]]), accumulates=False).peak_bytes[0]

    for model in (short, full):
        # A first pass, not remembered, fills the modules' caches of positions.
        model.traced.__wrapped__("fp32", "none", kernel, 2, 0)
    k, last = full.num_blocks - 2, sum(map(len, short.picked)) - 1
    assert peak(short, k, (0, last)) == pytest.approx(peak(full, k, (k, k)), rel=2e-3)
    assert peak(short, 0, (0, 0)) == peak(full, 0, (0, 0))


@given(
    st.lists(st.lists(st.sampled_from("aaab"), max_size=60), min_size=1, max_size=3),
    st.sets(st.integers(0, 179)),
)
def test_every_block_has_a_traced_one(kinds, adapted):
    picked, index, numbers = choose_traced(kinds, adapted)
    every = [(place, *one) for place, own in enumerate(kinds) for one in enumerate(own)]
    traced = [(place, at, kinds[place][at]) for place, own in enumerate(picked) for at in own]
    assert len(index) == len(every)
    assert index == sorted(index)
    assert set(index) == set(range(len(traced)))
    assert [i in numbers for i in index] == [number in adapted for number in range(len(every))]
    kinds_of = [(place, kind) for place, _, kind in every]
    assert [(traced[i][0], traced[i][2]) for i in index] == kinds_of
    alike = [["a"] * len(own) for own in kinds]
    assert [len(own) for own in choose_traced(alike)[0]] == [min(len(own), 3) for own in kinds]


def test_any_order_of_traces_gives_the_same(monkeypatch):
    family = FAMILIES["sdxl"]
    process = DiscreteDiffusion(num_train_timesteps=999)  # whose table no other test has made
    monkeypatch.setattr(type(family), "noise", process)
    model = TracedModel(family, TINY["sdxl"], workload_of("sdxl"), "cuda", Parts(), None, ("", ""))
    first, again = (model.traced.__wrapped__("bf16", "none", "flash", 2, 0) for _ in range(2))
    assert first.before.growth_bytes == again.before.growth_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only there it is used")
def test_second_process_begins_at_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def find(number):
        (tmp_path / str(number)).touch()
        awaited = {0: "2", 1: "0"}.get(number, str(number))
        while not (tmp_path / awaited).exists():
            time.sleep(0.01)
        return number, os.getpid()

    found = one_at_a_time(find, "test")
    with working_ahead([partial(found, number) for number in range(4)]):
        results = [found(number) for number in (0, 3)]
    assert [number for number, _ in results] == [0, 3]
    assert [process == os.getpid() for _, process in results] == [True, False]
    assert found(3) == results[1]
