"""Buckets never exceed the area, keep the aspect ratio, and account for every item."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.batches import MAX_ASPECT_RATIO, assign_buckets, choose_bucket_size, make_buckets
from autotune.data.items import Item
from autotune.errors import InvalidInput
from autotune.plan.workload import Bucket

sides = st.integers(1, 9000)
resolutions = st.integers(64, 1600)
multiples = st.sampled_from([8, 16, 32])
most = st.sampled_from([2048, 8192])


@given(sides, sides, resolutions, multiples, most)
def test_a_bucket_fits_area_multiple_ratio_and_side(width, height, resolution, multiple, max_side):
    to_width, to_height = choose_bucket_size(width, height, resolution, multiple, max_side)
    assert max(to_width, to_height) <= max_side
    assert to_width % multiple == to_height % multiple == 0
    assert 0 < to_width * to_height <= resolution**2
    assert 1 / MAX_ASPECT_RATIO <= to_width / to_height <= MAX_ASPECT_RATIO


def items_of(*sizes: tuple[int, int], frames: int = 1) -> list[Item]:
    paths = tuple(Path(f"{number}.png") for number in range(frames)) if frames > 1 else ()
    return [Item(Path("a.png"), "x", width, height, frame_paths=paths) for width, height in sizes]


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=40), resolutions, multiples)
def test_assignment_gives_back_the_counts(sizes, resolution, multiple):
    items = items_of(*sizes)
    buckets = make_buckets(items, resolution, multiple, 8192)
    assigned = assign_buckets(items, buckets)
    assert [assigned.count(index) for index in range(len(buckets))] == [
        bucket.num_items for bucket in buckets
    ]
    assert len(assigned) == len(sizes)


def test_planned_buckets_take_other_data_by_ratio_and_frames():
    wide = Bucket(width_px=128, height_px=32, num_frames=1, num_items=9)
    square = Bucket(width_px=64, height_px=64, num_frames=1, num_items=1)
    assert assign_buckets(items_of((300, 100), (100, 90), (10, 99)), (wide, square)) == (0, 1, 1)
    with pytest.raises(InvalidInput, match="5 frame"):
        assign_buckets(items_of((64, 64), frames=5), (wide, square))
