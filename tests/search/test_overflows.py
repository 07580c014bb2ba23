"""A trial in fp16 whose first gradients overflow: memory is measured with the optimizer's state,
or it is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from autotune.plan.candidate import TrialResult
from autotune.plan.job import ModelRef
from autotune.search import worker as steps
from autotune.search.worker import ChildState, TrialRequest
from autotune.train.optimizer import AdapterOptimizer
from tests.search.conftest import FIRST, workload

FP16 = FIRST.changed(precision="fp16", micro_batch_size=4)


@pytest.fixture
def measured(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], TrialResult]:
    """Runs a trial so many of whose first steps overflow."""

    def run(overflows: int) -> TrialResult:
        scale, calls = AdapterOptimizer.scale, [0]

        def scaled(optimizer: AdapterOptimizer, loss: Tensor) -> Tensor:
            calls[0] += 1
            return scale(optimizer, loss) * (1e30 if calls[0] <= overflows else 1.0)

        monkeypatch.setattr(AdapterOptimizer, "scale", scaled)
        return steps.run_trial(
            TrialRequest(ModelRef.of(small_model), workload(small_model), FP16, "cpu", 1),
            ChildState(),
        )

    return run


def test_memory_is_measured_after_the_first_step_that_was_taken(
    measured: Callable[[int], TrialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    memory_step = steps.StepRunner.memory_step

    def watched(runner: steps.StepRunner) -> tuple[int, float]:
        kept.append(len(runner.optimizer.inner.state))
        return memory_step(runner)

    monkeypatch.setattr(steps.StepRunner, "memory_step", watched)
    result = measured(2)
    assert (result.outcome, result.message) == ("ok", "")
    assert kept[0] > 0
    assert len(result.warmup_seconds) == 4
