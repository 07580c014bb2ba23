"""Nothing that is left out beats what is kept, and any number may be pinned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost.predict import CostModel
from autotune.plan.candidate import BLOCK_COUNTS, Candidate
from autotune.search.space import Mixtures, frontier
from tests import builders

points = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=60)


def mixtures_of(pairs: list[tuple[float, float]]) -> Mixtures:
    num_bytes, seconds = np.array(pairs).T
    return Mixtures(np.arange(4 * len(pairs)).reshape(-1, 4), num_bytes, seconds)


@given(points)
def test_frontier_holds_exactly_what_nothing_beats(pairs):
    kept = frontier(mixtures_of(pairs))
    found = set(zip(kept.num_bytes, kept.seconds, strict=True))
    wanted = {
        (a, b)
        for a, b in pairs
        if not any((x <= a and y <= b) and (x, y) != (a, b) for x, y in pairs)
    }
    assert found == wanted
    assert len(kept.num_bytes) == len(found)


@pytest.fixture(scope="module")
def cost() -> CostModel:
    context = builders.context(builders.hardware("attention.native", "precision.bf16"))
    return CostModel.build(
        context.hardware, context.workload, context.family, context.family.transformer_config
    )


def test_mixtures_are_predicted_as_each(cost):
    base = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    passes = np.array([[0, 0], [59, 0], [0, 59], [20, 30], [20, 39]])
    swapped = np.array([0, 1, 7, 40])
    num_bytes, seconds = cost.predict_block_counts(base, passes, swapped)
    assert num_bytes.shape == seconds.shape == (5, 4)
    predictions = [
        [
            cost.predict_uncalibrated(
                base.changed(**dict(zip(BLOCK_COUNTS, (*map(int, row), int(k)), strict=True)))
            )
            for k in swapped
        ]
        for row in passes
    ]
    wanted = np.array([[one.step_seconds for one in row] for row in predictions])
    assert seconds == pytest.approx(wanted, rel=1e-9)
    peaks = np.array([[one.training.run_memory_bytes for one in row] for row in predictions])
    besides = (
        peaks - num_bytes
    )  # adapter, optimizer, buffers, the process: the same for all but what rounds
    assert besides.max() - besides.min() < 0.001 * peaks.max()
