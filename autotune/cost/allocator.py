"""A model of PyTorch's CUDA caching allocator: what it reserves for a sequence of allocations.

Rules and constants: c10/cuda/CUDACachingAllocator.cpp of torch 2.x. The best-fitting free block is
split when the rest is worth keeping, and neighbors merge when freed. With expandable segments each
pool is one range that grows at its end by whole pages.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MIB = 1 << 20
BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LARGE_REQUEST_BYTES = 10 * MIB
SEGMENT_STEP_BYTES = 2 * MIB
Events = Iterable[tuple[int, int]]  # (number, bytes); a free has negative bytes


def rounded(size: int, step: int) -> int:
    """Round `size` up to a multiple of `step`, at least one."""
    return max(1, -(-size // step)) * step


@dataclass(eq=False)
class Block:
    """A stretch of a segment; `address` orders blocks of equal size as the allocator does."""

    size: int
    address: int
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass
class Pool:
    """Segments for small or for large requests."""

    small: bool
    expandable: bool
    reserved_bytes: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)
    _blocks: dict[int, Block] = field(default_factory=dict)
    _end: int = 0
    _last: Block | None = None

    def take(self, size: int) -> Block:
        at = bisect.bisect_left(self._free, (size, 0))
        block = self._blocks[self._free.pop(at)[1]] if at < len(self._free) else self._grow(size)
        rest = block.size - size
        if rest >= BLOCK_BYTES if (self.small or self.expandable) else rest > SMALL_REQUEST_BYTES:
            self._split(block, size)
        block.free = False
        return block

    def give(self, block: Block) -> None:
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._forget(before)
            block = self._merge(before, block)
        if after is not None and after.free:
            self._forget(after)
            block = self._merge(block, after)
        bisect.insort(self._free, (block.size, block.address))

    def _grow(self, size: int) -> Block:
        page = SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES
        if not self.expandable:
            is_large = not self.small and size >= LARGE_REQUEST_BYTES
            return self._new(rounded(size, SEGMENT_STEP_BYTES) if is_large else page, None)
        last = self._last
        if last is not None and last.free:
            self._forget(last)
            grown = rounded(size - last.size, page)
            last.size += grown
            self._end += grown
            self.reserved_bytes += grown
            return last
        return self._new(rounded(size, page), last)

    def _new(self, size: int, before: Block | None) -> Block:
        block = Block(size, self._end, before=before)
        if before is not None:
            before.after = block
        self._blocks[block.address] = block
        self._end += size
        self.reserved_bytes += size
        self._last = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        if self._last is block:
            self._last = rest
        bisect.insort(self._free, (rest.size, rest.address))

    def _merge(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        del self._blocks[right.address]
        if self._last is right:
            self._last = left
        return left

    def _forget(self, block: Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.size, block.address))]


class CachingAllocator:
    """Bytes allocated and reserved, now and at most, as allocations are replayed by number."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self._pools = {small: Pool(small, expandable_segments) for small in (True, False)}
        self._held: dict[int, tuple[Pool, Block]] = {}
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the device has lent; they go back only when memory runs out."""
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def allocate(self, number: int, size: int) -> None:
        if size <= 0:
            return
        needed = rounded(size, BLOCK_BYTES)
        pool = self._pools[needed <= SMALL_REQUEST_BYTES]
        self._held[number] = pool, (block := pool.take(needed))
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, number: int) -> None:
        if number in self._held:
            pool, block = self._held.pop(number)
            self.allocated_bytes -= block.size
            pool.give(block)


def replayed(events: Events, *, expandable_segments: bool = False) -> CachingAllocator:
    """Replay events from an empty allocator."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for number, size in events:
        if size >= 0:
            allocator.allocate(number, size)
        else:
            allocator.free(number)
    return allocator


def holes_of(events: Events) -> int:
    """Return bytes that expandable segments reserve beyond the most that is allocated."""
    allocator = replayed(events, expandable_segments=True)
    return allocator.reserved_bytes - allocator.peak_allocated_bytes


def waste_of(
    events: Events, kept: Sequence[tuple[int, int]], *, expandable_segments: bool
) -> tuple[float, float]:
    """Return what is reserved beyond a short pass's peak, whatever its depth, and by what share
    tensors that outlive a block's forward pass are rounded; not in expandable segments."""
    allocator = replayed(events, expandable_segments=expandable_segments)
    peak, asked = allocator.peak_allocated_bytes, sum(size for _, size in kept)
    rounds = asked and not expandable_segments
    share = replayed(kept).reserved_bytes / asked - 1 if rounds else 0.0
    return max(0.0, allocator.reserved_bytes - peak - share * peak), share
