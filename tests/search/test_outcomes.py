"""Which figures are a spill, and which steps may stop a trial early."""

import pytest

from autotune.search.trials import find_spill
from autotune.search.worker import classify_error
from tests.builders import GIB, candidate, trial

CAP = 10 * GIB
EARLIER = [(trial(candidate(), 1.0), 1.0), (trial(candidate(), 2.0), 1.5)]


def test_a_cliff_at_the_edge_of_memory_is_a_spill() -> None:
    slow = trial(candidate(), 9.0, 9 * GIB)
    assert "spilled" in (find_spill(slow, 1.0, EARLIER, CAP) or "")


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
