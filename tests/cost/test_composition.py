"""Three traced blocks of each kind give any depth, with any number of them checkpointed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TINY, cpu, gpu, workload_of

from autotune.cost.model import TracedModel
from autotune.cost.timing import Rates
from autotune.cost.trace import BlockTables, choose_traced, compose, table_of
from autotune.models.facts import Parts
from autotune.models.registry import FAMILIES

DEPTHS = {
    "qwen-image": {"num_layers": 9},
    "flux1-dev": {"num_layers": 4, "num_single_layers": 6},
    "kandinsky5-image-lite": {"num_visual_blocks": 9},
    "sd3.5": {"num_layers": 10, "dual_attention_layers": tuple(range(5))},
}


@pytest.mark.quick(("qwen-image", "2-6"))
@pytest.mark.parametrize(
    ("name", "rules", "adapted"),
    [
        ("qwen-image", "cpu", "all"),
        ("flux1-dev", "cuda", "all"),
        ("kandinsky5-image-lite", "cpu", "all"),
        ("qwen-image", "cpu", "2-6"),
        ("flux1-dev", "cuda", "2-3,5"),
        ("sd3.5", "cpu", "all"),
        ("sd3.5", "cuda", "3-7"),
    ],
)
def test_short_traces_predict_deep_models(name, rules, adapted, monkeypatch):
    config = {**TINY[name], **DEPTHS[name]}
    workload = workload_of(name, config=config).changed(adapted_blocks=adapted)
    rates = Rates(cpu() if rules == "cpu" else gpu("nvidia-l4"), "fp32", "native", "cpu")
    short = TracedModel(FAMILIES[name], config, workload, rules, Parts())
    monkeypatch.setattr("autotune.cost.trace.TRACED_BLOCKS", 99)
    full = TracedModel(FAMILIES[name], config, workload, rules, Parts())
    kernel = "cpu" if rules == "cpu" else "flash"

    def peak(model, k, modes):
        tables = [table_of(model.traced("fp32", "none", kernel, 2, c), rates, 4) for c in modes]
        plain, mixed = (table.stretched(model.index) for table in tables)
        grads = np.array(model.model_bytes("fp32", "none").block_adapter_bytes, dtype=float)
        blocks = BlockTables([plain, plain, mixed], grads)
        return compose(blocks, np.array([[k, 0]]), accumulates=False).peak_bytes[0]

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
