"""The order of data: complete, exact in its batch size, and the same from wherever it is
entered."""

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.data.batches import BatchOrder


@st.composite
def orders(draw: st.DrawFn, max_items: int = 25) -> BatchOrder:
    items = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=max_items)
    )
    return BatchOrder(
        groups=tuple(group for group, _ in items),
        repeats=tuple(repeats for _, repeats in items),
        effective_batch_size=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 5)),
        caption_dropout=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


@given(orders())
def test_every_image_is_seen_its_repeats_in_every_epoch(order):
    num_steps = math.lcm(order.epoch_size, order.effective_batch_size) // order.effective_batch_size
    row = [draw.item for step in range(num_steps) for draw in order.images(step)]
    for start in range(0, len(row), order.epoch_size):
        assert Counter(row[start : start + order.epoch_size]) == dict(enumerate(order.repeats))


@given(orders(), st.integers(0, 200), st.integers(1, 5))
def test_a_step_is_one_effective_batch_of_micro_batches_within_one_group(order, step, size):
    planned = order.micro_batches(step, size)
    seen = [draw for micro in planned for draw in micro.draws]
    assert Counter(seen) == Counter(order.images(step))
    assert len(seen) == order.effective_batch_size
    for micro in planned:
        assert 1 <= len(micro.indices) <= size
        assert len({order.groups[index] for index in micro.indices}) == 1
        assert micro.weight == len(micro.indices) / order.effective_batch_size


@given(orders(), st.integers(0, 200), st.integers(1, 4), st.integers(1, 4))
def test_processes_share_a_step_without_rest(order, step, size, world_size):
    assume(order.effective_batch_size % world_size == 0)
    parts = [
        order.micro_batches(step, size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    assert len({sum(len(micro.indices) for micro in part) for part in parts}) == 1
    for part in parts:
        assert sum(micro.weight for micro in part) == pytest.approx(1)
        assert all(1 <= len(micro.indices) <= size for micro in part)
        assert all(len({order.groups[index] for index in micro.indices}) == 1 for micro in part)
    seen = [draw for part in parts for micro in part for draw in micro.draws]
    assert Counter(seen) == Counter(order.images(step))


@given(orders(), st.integers(0, 60), st.integers(1, 4))
def test_weighted_means_give_the_mean_over_the_effective_batch(order, step, size):
    losses = [math.sin(index) for index in range(len(order.groups))]
    weighted = sum(
        micro.weight * sum(losses[index] for index in micro.indices) / len(micro.indices)
        for micro in order.micro_batches(step, size)
    )
    images = order.images(step)
    assert weighted == pytest.approx(sum(losses[draw.item] for draw in images) / len(images))


@given(orders(), st.lists(st.integers(0, 50), max_size=8))
def test_a_step_is_the_same_whatever_was_asked_before(order, steps):
    in_row = [order.images(step) for step in range(51)]
    for step in steps:
        assert dataclasses.replace(order).images(step) == in_row[step]


def test_dropout_happens_as_often_as_asked_and_does_not_disturb_the_order():
    plain, dropping = (
        BatchOrder((0,) * 500, (1,) * 500, 10, seed=3, caption_dropout=rate) for rate in (0.0, 0.2)
    )
    images = [draw for step in range(200) for draw in dropping.images(step)]
    assert [draw.item for draw in images] == [
        draw.item for step in range(200) for draw in plain.images(step)
    ]
    assert sum(draw.dropped for draw in images) / len(images) == pytest.approx(0.2, abs=0.04)
