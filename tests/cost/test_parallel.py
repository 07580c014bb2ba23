"""Memory and traffic of several processes."""

from collections.abc import Callable

import pytest

from autotune.cost.memory import GATHERED_BLOCKS, Parallel
from autotune.cost.predict import CostModel
from autotune.plan.candidate import Candidate
from autotune.search.expected import build_expectation
from autotune.search.winner import Score
from tests.builders import trial
from tests.plan.test_file import make_plan

CANDIDATE = Candidate(micro_batch_size=1, checkpointed_blocks=0)


@pytest.fixture(scope="module")
def alone(predictor: Callable[[str], CostModel]) -> CostModel:
    return predictor("flux1-dev")


def _several(alone: CostModel, strategy: str, number: int) -> CostModel:
    return alone.with_parallel(Parallel(strategy, number))  # type: ignore[arg-type]


def test_ddp_holds_each_gradient_once_more(alone):
    model_bytes = alone.model.model_bytes("bf16", "none")
    one, two = alone.predict(CANDIDATE), _several(alone, "ddp", 2).predict(CANDIDATE)
    assert two.allocated_memory_bytes - one.allocated_memory_bytes == model_bytes.adapter_bytes
    assert two.phases[0] == one.phases[0]


def test_trials_compare_with_one_process(alone):
    """It has no buckets; what it teaches must not take them off again where there are several."""
    two, one = _several(alone, "ddp", 2), alone.predict_uncalibrated(CANDIDATE)
    host = 2 * one.allocated_memory_bytes
    ran = trial(CANDIDATE, one.step_seconds, one.allocated_memory_bytes, host_memory_bytes=host)
    residual = two.residual(ran)
    assert residual is not None
    assert (residual.time, residual.memory) == (0.0, 0.0)
    score = Score(CANDIDATE, one.step_seconds, one.allocated_memory_bytes)
    known = alone.workload, make_plan().job
    beside, single = (build_expectation(score, [ran], cost, *known) for cost in (two, alone))
    buckets = alone.model.model_bytes("bf16", "none").adapter_bytes
    assert beside.process_memory_bytes - single.process_memory_bytes == buckets


def test_fsdp2_keeps_parts_and_gathers(alone):
    model_bytes = alone.model.model_bytes("bf16", "none")
    one, four = alone.predict(CANDIDATE), _several(alone, "fsdp2", 4).predict(CANDIDATE)
    gathered = GATHERED_BLOCKS * model_bytes.largest_block_bytes + model_bytes.outside_bytes
    kept = -(-model_bytes.weight_bytes // 4)
    more = kept - model_bytes.weight_bytes + gathered + model_bytes.adapter_bytes
    assert four.allocated_memory_bytes == pytest.approx(one.allocated_memory_bytes + more, abs=2)
    assert _several(alone, "fsdp2", 4).weight_bytes(CANDIDATE) == kept
