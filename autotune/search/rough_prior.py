"""A first guess of time and memory by counting passes and activations: only the order of candidates matters."""

import math
from collections.abc import Callable

from autotune.schema import Candidate, Workload

WEIGHT_BYTES = {"none": 1.0, "torchao-int8": 0.5, "torchao-fp8": 0.5}
"""Of frozen base weights, relative to unquantised bf16."""


def rough_step_seconds(workload: Workload) -> Callable[[Candidate], float]:
    """Step time up to a factor: forward, backward of twice the work, and recomputation of checkpointed blocks."""
    blocks = workload.model.num_blocks

    def prior(candidate: Candidate) -> float:
        recompute = candidate.checkpointed_blocks / blocks
        overhead = 1 + 0.2 / candidate.micro_batch_size
        return (3 + recompute) * overhead

    return prior


def rough_memory_bytes(workload: Workload) -> Callable[[Candidate], float]:
    """Peak memory up to a factor: weights, and activations of the blocks that are not checkpointed."""
    spec, bucket = workload.model, workload.largest_bucket
    tokens = bucket.width_px * bucket.height_px * bucket.num_frames / 256 + workload.max_text_tokens
    width = math.sqrt(spec.num_parameters / spec.num_blocks / 18)  # a block has about 18 square matrices of its width

    def memory(candidate: Candidate) -> float:
        kept = spec.num_blocks - candidate.checkpointed_blocks + 1
        activations = candidate.micro_batch_size * tokens * width * 2 * (34 * kept + candidate.checkpointed_blocks)
        return spec.num_parameters * 2 * WEIGHT_BYTES.get(candidate.quantization, 1.0) + activations

    return memory
