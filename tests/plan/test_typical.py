"""A step of usual shapes, beside the largest that decides memory."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.data.dataset import read_dataset
from autotune.models.registry import get_family
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import (
    Bucket,
    Workload,
    WorkloadRequest,
    mean_text_tokens,
    padded_text_tokens,
    spread_of,
    typical_bucket,
    typical_text_tokens,
)
from autotune.search.gradient_checks import small_workload
from autotune.search.worker import StepRunner, TrialRequest, load_for_trial
from autotune.train.prepare import describe_workload
from tests import builders
from tests.train.small import write_model_and_images

lengths = st.lists(st.integers(1, 1024), min_size=1, max_size=64).map(sorted)


@given(lengths, st.integers(1, 64))
def test_a_spread_rises_within_its_values(values, count):
    spread = spread_of(values, count)
    assert len(spread) == count
    assert list(spread) == sorted(spread)
    assert values[0] <= spread[0]
    assert spread[-1] <= values[-1]


@given(lengths, st.integers(1, 32))
def test_usual_captions_have_mean_length(values, batch):
    work = workload(values, batch)
    mean = sum(typical_text_tokens(work)) / batch
    if len(values) % batch == 0 or batch % len(values) == 0:
        assert mean == pytest.approx(sum(values) / len(values), abs=0.5)
    padded = [padded_text_tokens(work, size) for size in (1, batch)]
    assert padded == [pytest.approx(mean), max(typical_text_tokens(work))]
    assert padded[1] <= work.max_text_tokens


@pytest.mark.parametrize("quantiles", [(3, 2), (1, 13), (0, 2), (1,) * 65])
def test_quantiles_that_cannot_be_are_refused(quantiles):
    with pytest.raises(ValidationError):
        builders.workload(max_text_tokens=12, text_token_quantiles=quantiles)


def test_usual_bucket_is_near_mean():
    def work(*items: int) -> Workload:
        frames = zip((1, 41, 81), items, strict=True)
        shape = {"width_px": 64, "height_px": 64}
        buckets = tuple(Bucket(**shape, num_frames=n, num_items=count) for n, count in frames)
        return builders.workload(buckets=buckets)

    works = work(1, 9, 1), work(0, 0, 0), work(0, 0, 3)
    assert [typical_bucket(work).num_frames for work in works] == [41, 81, 81]


@pytest.mark.slow
def test_one_long_caption_decides_nothing(tmp_path, monkeypatch):
    model, images = write_model_and_images(tmp_path)
    first = min(images.glob("*.txt"))
    first.write_text(" ".join(["sail"] * 60))
    work = describe_workload(
        resolve_model(ModelRef.of(model)),
        read_dataset(images),
        WorkloadRequest(resolution=(32, 32), effective_batch_size=2),
    )
    assert mean_text_tokens(work) < 0.5 * work.max_text_tokens
    chosen = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    request = TrialRequest(resolve_model(ModelRef.of(model)), work, chosen, "cpu", 2)
    steps, seen = StepRunner(load_for_trial(request), work, request.candidate), []
    forward = steps.model.family.predict

    def watched(_: object, transformer: object, noisy: object, *more: Any) -> torch.Tensor:
        seen.append(more[1]["prompt_embeds"].shape[1])
        return forward(transformer, noisy, *more)

    monkeypatch.setattr(type(steps.model.family), "predict", watched)
    result = steps.measure(lambda times: len(times) < 2)
    assert (len(result.warmup_seconds), len(result.step_seconds)) == (3, 2)
    by_step = list(zip(seen[::2], seen[1::2], strict=True))
    longest = (work.max_text_tokens, work.max_text_tokens - 1)
    assert by_step == [longest] * 2 + [typical_text_tokens(work)] * 3


def test_uneven_captions_leave_a_check_alone():
    even, uneven = workload([900], 4), workload([3, 5, 900], 4)
    family = get_family(even.model.family)
    assert small_workload(family, uneven) == small_workload(family, even)


def workload(values: list[int], batch: int) -> Workload:
    quantiles = tuple(values)
    return builders.workload(
        max_text_tokens=values[-1], text_token_quantiles=quantiles, effective_batch_size=batch
    )
