"""What several processes keep and send."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.cost.parallel import GATHERED_BLOCKS, PCIE_BANDWIDTH, Parallel
from autotune.cost.predict import Predictor
from autotune.schema import Candidate

CANDIDATE = Candidate(micro_batch_size=1, checkpointed_blocks=0)


@pytest.fixture(scope="module")
def alone(predictor: Callable[[str], Predictor]) -> Predictor:
    return predictor("flux1-dev")


def _several(alone: Predictor, strategy: str, number: int) -> Predictor:
    made = Predictor(
        alone.hardware,
        alone.workload,
        alone.family,
        alone.config,
        parallel=Parallel(strategy, number),  # type: ignore[arg-type]
    )
    made.__dict__["model"] = alone.model
    return made


def test_ddp_holds_each_gradient_once_more(alone: Predictor) -> None:
    storage = alone.model.storage("bf16", "none")
    one, two = alone.predict(CANDIDATE), _several(alone, "ddp", 2).predict(CANDIDATE)
    assert two.allocated_memory_bytes - one.allocated_memory_bytes == storage.adapter_bytes
    assert two.phases[0] == one.phases[0]


def test_fsdp2_keeps_a_part_and_gathers_what_runs(alone: Predictor) -> None:
    storage = alone.model.storage("bf16", "none")
    one, four = alone.predict(CANDIDATE), _several(alone, "fsdp2", 4).predict(CANDIDATE)
    gathered = GATHERED_BLOCKS * storage.largest_block_bytes + storage.outside_bytes
    kept = -(-storage.weight_bytes // 4)
    expected = one.allocated_memory_bytes - storage.weight_bytes + kept + gathered + storage.adapter_bytes
    assert four.allocated_memory_bytes == pytest.approx(expected, abs=2)
    assert _several(alone, "fsdp2", 4).weight_bytes(CANDIDATE) == kept


def test_a_step_waits_for_what_outlasts_its_computing(alone: Predictor) -> None:
    storage = alone.model.storage("bf16", "none")
    seconds = Parallel("fsdp2", 2).exchange_seconds(alone.hardware, storage, accumulation=3)
    assert seconds == pytest.approx((storage.adapter_bytes + 3 * storage.weight_bytes) / PCIE_BANDWIDTH)
    assert Parallel().exchange_seconds(alone.hardware, storage, 3) == 0
    huge = replace(storage, weight_bytes=10**15)
    assert Parallel("fsdp2", 2).exchange_seconds(alone.hardware, huge, 1) > 10_000
