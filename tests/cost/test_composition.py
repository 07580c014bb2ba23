"""Three traced blocks of each kind give any depth, with any number of them checkpointed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TINY, cpu, gpu, workload_of

from autotune.cost.composition import BlockTables, compose, stretched_index, table_of
from autotune.cost.model import TracedModel
from autotune.cost.timing import Rates
from autotune.families.published import Parts
from autotune.families.registry import FAMILIES

DEPTHS = {
    "qwen-image": {"num_layers": 9},
    "flux1-dev": {"num_layers": 4, "num_single_layers": 6},
    "kandinsky5-image-lite": {"num_visual_blocks": 9},
}


@pytest.mark.parametrize(
    ("name", "rules"), [("qwen-image", "cpu"), ("flux1-dev", "cuda"), ("kandinsky5-image-lite", "cpu")]
)
def test_short_traces_predict_deep_models_to_the_byte(name, rules, monkeypatch):
    config = {**TINY[name], **DEPTHS[name]}
    workload = workload_of(name, config=config)
    rates = Rates(cpu() if rules == "cpu" else gpu("nvidia-l4"), "fp32", "native", "cpu")
    short = TracedModel(FAMILIES[name], config, workload, rules, Parts())
    monkeypatch.setattr("autotune.cost.model.TRACED_BLOCKS", 99)
    full = TracedModel(FAMILIES[name], config, workload, rules, Parts())
    kernel = "cpu" if rules == "cpu" else "flash"

    def peak(model, k, modes):
        tables = [table_of(model.traced("fp32", "none", kernel, 2, c), rates, 4) for c in modes]
        stretched = [t.stretched(full.counts, model.traced_counts) for t in tables]
        grads = np.array(model.storage("fp32", "none").block_adapter_bytes, dtype=float)
        plain, mixed = stretched
        blocks = BlockTables([plain, plain, mixed], grads)
        return compose(blocks, np.array([[k, 0, 0]]), accumulates=False).peak_bytes[0]

    total = sum(full.counts)
    for model in (short, full):
        model.traced("fp32", "none", kernel, 2, 0)
        model.traced.cache_clear()  # the first pass fills the modules' caches of positions
    for k in (1, total - 2):
        direct = peak(full, k, (k, k))
        assert peak(short, k, (0, sum(short.traced_counts) - 1)) == pytest.approx(direct, rel=2e-3), k
    assert peak(short, 0, (0, 0)) == peak(full, 0, (0, 0))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=1, max_size=3))
def test_every_block_is_stood_for_by_one_of_its_kind(kinds):
    counts = [count for count, _ in kinds]
    traced = [min(count, limit) for count, limit in kinds]
    index = stretched_index(counts, traced)
    assert len(index) == sum(counts)
    start = position = 0
    for count, have in zip(counts, traced, strict=True):
        own = index[position : position + count]
        assert all(start <= i < start + have for i in own)
        assert own == sorted(own)
        if count:
            assert (own[0], own[-1]) == (start, start + have - 1)
        start, position = start + have, position + count
