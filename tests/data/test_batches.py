"""The order of data, its buckets, and the loader that follows it."""

import dataclasses
import math
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, strategies as st

from autotune.data.batches import (
    MAX_ASPECT_RATIO,
    BatchLoader,
    BatchOrder,
    assign_buckets,
    choose_bucket_size,
    make_buckets,
)
from autotune.data.items import Item
from autotune.errors import AutotuneError, InvalidInput
from autotune.models.qwen_image import QwenImage
from autotune.plan.workload import Bucket


@st.composite
def orders(draw, max_items=25):
    pairs = st.tuples(st.integers(0, 3), st.integers(1, 3))
    items = draw(st.lists(pairs, min_size=1, max_size=max_items))
    return BatchOrder(
        groups=tuple(group for group, _ in items),
        repeats=tuple(repeats for _, repeats in items),
        effective_batch_size=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 5)),
        caption_dropout=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


@given(orders())
def test_epochs_show_every_image_its_repeats(order):
    num_steps = math.lcm(order.epoch_size, order.effective_batch_size) // order.effective_batch_size
    row = [draw.item for step in range(num_steps) for draw in order.images(step)]
    for start in range(0, len(row), order.epoch_size):
        assert Counter(row[start : start + order.epoch_size]) == dict(enumerate(order.repeats))


@given(orders(), st.integers(0, 200), st.integers(1, 5))
def test_steps_are_batches_of_one_group(order, step, size):
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
    ranks = range(world_size)
    parts = [order.micro_batches(step, size, rank=rank, world_size=world_size) for rank in ranks]
    assert len({len(part) for part in parts}) == 1
    assert len({sum(len(micro.indices) for micro in part) for part in parts}) == 1
    for part in parts:
        assert sum(micro.weight for micro in part) == pytest.approx(1)
        assert all(1 <= len(micro.indices) <= size for micro in part)
        assert all(len({order.groups[index] for index in micro.indices}) == 1 for micro in part)
    seen = [draw for part in parts for micro in part for draw in micro.draws]
    assert Counter(seen) == Counter(order.images(step))


@given(orders(), st.lists(st.integers(0, 50), max_size=8))
def test_steps_do_not_depend_on_history(order, steps):
    in_row = [order.images(step) for step in range(51)]
    for step in steps:
        assert dataclasses.replace(order).images(step) == in_row[step]


def test_dropout_leaves_the_order_alone():
    orders = (
        BatchOrder((0,) * 500, (1,) * 500, 10, seed=3, caption_dropout=rate) for rate in (0.0, 0.2)
    )
    plain, images = ([draw for step in range(200) for draw in each.images(step)] for each in orders)
    assert [draw.item for draw in images] == [draw.item for draw in plain]
    assert sum(draw.dropped for draw in images) / len(images) == pytest.approx(0.2, abs=0.04)


sides = st.integers(1, 9000)
resolutions = st.integers(64, 1600)
multiples = st.sampled_from([8, 16, 32])
most = st.sampled_from([2048, 8192])


@given(sides, sides, resolutions, multiples, most)
def test_buckets_keep_every_limit(width, height, resolution, multiple, max_side):
    to_width, to_height = choose_bucket_size(width, height, resolution, multiple, max_side)
    assert max(to_width, to_height) <= max_side
    assert to_width % multiple == to_height % multiple == 0
    assert 0 < to_width * to_height <= resolution**2
    assert 1 / MAX_ASPECT_RATIO <= to_width / to_height <= MAX_ASPECT_RATIO


def items_of(*sizes, frames=1):
    paths = tuple(Path(f"{number}.png") for number in range(frames)) if frames > 1 else ()
    return [Item(Path("a.png"), "x", width, height, frame_paths=paths) for width, height in sizes]


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=40), resolutions, multiples)
def test_assignment_gives_back_the_counts(sizes, resolution, multiple):
    items = items_of(*sizes)
    buckets = make_buckets(items, resolution, multiple, 8192)
    assigned = assign_buckets(items, buckets)
    counts = [bucket.num_items for bucket in buckets]
    assert [assigned.count(index) for index in range(len(buckets))] == counts
    assert len(assigned) == len(sizes)


def test_planned_buckets_take_other_data():
    wide = Bucket(width_px=128, height_px=32, num_frames=1, num_items=9)
    square = Bucket(width_px=64, height_px=64, num_frames=1, num_items=1)
    assert assign_buckets(items_of((300, 100), (100, 90), (10, 99)), (wide, square)) == (0, 1, 1)
    with pytest.raises(InvalidInput, match="5 frame"):
        assign_buckets(items_of((64, 64), frames=5), (wide, square))


class Data:
    def __init__(self, *, read_seconds=0.0, fail_at=None, uneven=False):
        self.read_seconds, self.fail_at, self.uneven = read_seconds, fail_at, uneven
        self.num_read = 0

    def sample(self, index, dropped=False, caption=0, flipped=False, is_prior=False):
        time.sleep(self.read_seconds + (0.002 * (index % 3) if self.uneven else 0))
        if self.num_read == self.fail_at:
            raise AutotuneError("lost an entry", hint="run again")
        self.num_read += 1
        return {
            "latents": torch.full((1, 1, 2, 2), float(index)),
            "prompt_embeds": torch.zeros(1 if dropped else 3, 4),
        }


ORDER = BatchOrder(
    groups=(0, 0, 0, 1, 1, 1), repeats=(1,) * 6, effective_batch_size=4, seed=0, caption_dropout=0.3
)


def loader(data, *, steps=range(6), num_workers=1, **process):
    batches = ORDER.batches(steps, 2, **process)
    return BatchLoader(data.sample, batches, QwenImage().collate, num_workers)


def no_thread_left():
    return not any(thread.name.startswith("autotune-data") for thread in threading.enumerate())


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("first_step", [0, 3, 6])
def test_batches_follow_the_plan(first_step, num_workers):
    steps = range(first_step, 6)
    batches = list(loader(Data(uneven=True), steps=steps, num_workers=num_workers))
    planned = [micro.indices for step in steps for micro in ORDER.micro_batches(step, 2)]
    assert [tuple(int(x) for x in batch["latents"][:, 0, 0, 0, 0]) for batch in batches] == planned
    assert no_thread_left()


def test_leaving_early_ends_the_thread():
    data = Data()
    for _ in loader(data, steps=range(10_000)):
        break
    assert no_thread_left()
    assert data.num_read <= 2 * 5


def test_error_while_reading_reaches_loop():
    with pytest.raises(AutotuneError, match="lost an entry"):
        list(loader(Data(fail_at=5)))
    assert no_thread_left()
