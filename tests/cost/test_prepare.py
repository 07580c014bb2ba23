"""Candidates that are predicted together are predicted as one by one, to the last bit."""

import itertools

from tiny_models import TINY, workload_of

from autotune.cost.predict import BLOCK_NUMBERS, CostModel
from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate


def test_predictions_of_many_candidates_are_those_of_each_alone():
    card = profile_of_gpu(next(gpu for gpu in load_catalog() if gpu.id == "nvidia-rtx-4090"))
    known = (card, workload_of("flux1-dev"), FAMILIES["flux1-dev"], TINY["flux1-dev"])
    together, alone = CostModel.build(*known), CostModel.build(*known)
    most = together.workload.model.num_blocks
    candidates = [
        Candidate(
            micro_batch_size=size,
            quantization=stored,
            **dict(zip(BLOCK_NUMBERS, numbers, strict=True)),
        )
        for size, stored in ((1, "none"), (2, "torchao-int8"))
        for numbers in itertools.product((0, 1, most - 1, most), (0, 1), (0, 1))
        if numbers[0] + numbers[1] <= most and numbers[2] <= numbers[0] + numbers[1]
    ]
    together.prepare(candidates)
    assert len(together.tables.steps) == len(candidates)
    assert [together.predict(each) for each in candidates] == [
        alone.predict(each) for each in candidates
    ]
