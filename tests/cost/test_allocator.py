"""The allocator model keeps the real one's invariants, whatever is asked of it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost.allocator import MIB, CachingAllocator, replayed

REQUESTS = st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), max_size=60)


@given(REQUESTS, st.booleans())
def test_reserved_holds_what_is_allocated(requests, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    held: dict[int, int] = {}
    for number, (size, frees) in enumerate(requests, start=1):
        allocator.allocate(number, size)
        held[number] = size
        if frees and held:
            oldest = next(iter(held))
            allocator.free(oldest)
            del held[oldest]
        assert sum(held.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
        blocks = sorted((id(pool), b.address, b.size) for pool, b in allocator._held.values())
        for (pool, start, length), (other, following, _) in pairwise(blocks):
            assert pool != other or start + length <= following
    for number in list(held):
        allocator.free(number)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_have_the_documented_sizes(size, reserved):
    assert replayed([(1, size)]).reserved_bytes == reserved


def test_expandable_segments_join_free_ends():
    events = [(1, 12 * MIB), (1, -1), (2, 30 * MIB)]
    assert replayed(events, expandable_segments=True).reserved_bytes == 40 * MIB
    assert replayed(events).reserved_bytes == 42 * MIB
