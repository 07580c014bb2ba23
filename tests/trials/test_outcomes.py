"""Which figures are a spill, and which steps may stop a trial early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.trials import TimedTrial, find_spill, pruning_threshold
from autotune.search.worker import classify_error
from autotune.train.monitor import SPILL_FACTOR
from tests.builders import GIB, candidate, trial

CAP = 10 * GIB
EARLIER = [TimedTrial(1.0, 1.0), TimedTrial(2.0, 1.5)]


def test_a_cliff_at_the_edge_of_memory_is_a_spill() -> None:
    assert "spilled" in (
        find_spill(trial(candidate(), 9.0, 9 * GIB), TimedTrial(9.0, 1.0), EARLIER, CAP) or ""
    )


def test_slow_steps_with_memory_to_spare_or_slow_as_foretold_are_none() -> None:
    assert find_spill(trial(candidate(), 9.0, 5 * GIB), TimedTrial(9.0, 1.0), EARLIER, CAP) is None
    assert find_spill(trial(candidate(), 9.0, 9 * GIB), TimedTrial(9.0, 8.0), EARLIER, CAP) is None
    assert (
        find_spill(
            trial(candidate(), 9.0, 9 * GIB), TimedTrial(9.0, 1.0), [TimedTrial(8.0, 1.0)], CAP
        )
        is None
    )
    assert find_spill(trial(candidate(), 9.0, 9 * GIB), TimedTrial(9.0, 1.0), [], CAP) is None


@given(
    st.floats(1e-3, 1e3),
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6),
    st.floats(0.5, SPILL_FACTOR * 0.99),
)
def test_a_model_wrong_by_less_than_a_cliff_never_makes_one(
    scale: float, ratios: list[float], wrong: float
) -> None:
    earlier = [TimedTrial(scale * ratio, scale) for ratio in ratios]
    now = TimedTrial(scale * wrong, scale)
    assert find_spill(trial(candidate(), now.seconds, CAP), now, earlier, CAP) is None


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
        "cudaErrorMemoryAllocation: the API call failed",
        "CUDA driver error: err 2 != CUDA_SUCCESS",
    ],
)
def test_memory_runs_out_in_many_words(words: str) -> None:
    assert classify_error(RuntimeError(words)) == "oom"
    assert classify_error(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")) == "crash"


def test_the_pruning_threshold_is_beyond_the_noise_of_the_best() -> None:
    assert pruning_threshold(None) is None
    assert pruning_threshold(trial(candidate(), None)) is None
    calm = trial(candidate(), step_seconds=(1.0, 1.0, 1.01))
    noisy = trial(candidate(), step_seconds=(0.8, 1.0, 1.3))
    assert pruning_threshold(calm) == 1.25
    assert (pruning_threshold(noisy) or 0) > 2
