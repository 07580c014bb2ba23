"""From traced segments to a model of any depth: levels of live memory along the pass, and their peak.

A pass is a row of segments: what comes before the blocks, each block forward, what comes between (output layers and
loss), each block backward. Each segment changes the level of live bytes by its growth and rises above its start by its
peak, so the peak of the whole pass is the largest level plus segment peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.cost.timing import Rates, seconds_by_class

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from autotune.cost.trace.passes import TracePass
    from autotune.cost.trace.recorder import Segment

GROWTH, PEAK, SCRATCH, SECONDS = 0, 1, 2, 3
"""Columns of a segment's vector: bytes, bytes, bytes, then seconds by class and the number of launches."""


@dataclass(frozen=True)
class PassTable:
    """A traced pass as vectors, each of (growth, peak, scratch, seconds by class ..., launches)."""

    before: "NDArray[np.float64]"
    forward: "NDArray[np.float64]"
    """(blocks, columns)"""
    between: "NDArray[np.float64]"
    backward: "NDArray[np.float64]"
    """(blocks, columns), in the order that blocks run forward."""

    def stretched(self, counts: Sequence[int], traced: Sequence[int]) -> "PassTable":
        """To `counts` blocks of each kind, from the `traced` ones: the one in the middle is repeated."""
        index = stretched_index(counts, traced)
        backward = self.backward[index] if len(self.backward) else self.backward
        return PassTable(self.before, self.forward[index], self.between, backward)

    @property
    def seconds(self) -> "NDArray[np.float64]":
        """By class, of the whole pass."""
        rows = np.concatenate([self.before[None], self.forward, self.between[None], self.backward])
        by_class: NDArray[np.float64] = rows[:, SECONDS:-1].sum(axis=0)
        return by_class

    def towards(self, other: "PassTable", share: float) -> "PassTable":
        """The point on the line from this table (share 0) through `other` (share 1)."""
        return PassTable(
            self.before + share * (other.before - self.before),
            self.forward + share * (other.forward - self.forward),
            self.between + share * (other.between - self.between),
            self.backward + share * (other.backward - self.backward),
        )


def stretched_index(counts: Sequence[int], traced: Sequence[int]) -> list[int]:
    """For each block of the full model, the traced block that stands for it."""
    index: list[int] = []
    start = 0
    for count, have in zip(counts, traced, strict=True):
        last = [have - 1] if have > 1 else []
        order = [0, *[min(1, have - 1)] * (count - 1 - len(last)), *last] if count > have else list(range(count))
        index += [start + j for j in order]
        start += have
    return index


def table_of(traced: "TracePass", rates: Rates, rank: int) -> PassTable:
    """Turn segments into vectors, with seconds at this machine's rates."""

    def vector(segment: "Segment") -> list[float]:
        memory = (segment.growth_bytes, segment.peak_bytes, segment.workspace_bytes)
        return [*memory, *seconds_by_class(segment.work, rates, rank)]

    return PassTable(
        before=np.array(vector(traced.before)),
        forward=np.array([vector(segment) for segment in traced.forward]),
        between=np.array(vector(traced.between)),
        backward=np.array([vector(segment) for segment in traced.backward]),
    )


@dataclass(frozen=True)
class ComposedPass:
    """One micro-batch of the full model. Bytes are beyond parameters, optimizer and buffers."""

    peak_bytes: float
    saved_bytes: float
    """Live when the segment of the peak begins, gradients apart."""
    transient_bytes: float
    """Above that, kernel scratch memory apart."""
    workspace_bytes: float
    gradient_bytes: float
    """Gradients that exist when the segment of the peak begins."""
    work: "NDArray[np.float64]"
    """Seconds by class, then launches."""
    recompute: "NDArray[np.float64]"
    """The share of `work` that repeats checkpointed blocks."""


def compose(
    plain: PassTable, mixed: PassTable, checkpointed: int, gradients: "NDArray[np.float64]", accumulates: bool
) -> ComposedPass:
    """Levels and work of a pass whose first `checkpointed` blocks recompute.

    Args:
        plain: stretched table of a pass without checkpointing.
        mixed: stretched table of a pass with checkpointing, of all blocks but the last unless all are checkpointed.
        gradients: bytes of each block's adapter gradients, in the order that blocks run.
        accumulates: whether gradients of an earlier micro-batch are already there.
    """
    recomputes = np.arange(len(plain.forward))[:, None] < checkpointed
    forward = np.where(recomputes, mixed.forward, plain.forward)
    backward = np.where(recomputes, mixed.backward, plain.backward)
    ends = mixed if checkpointed else plain
    rows = np.concatenate([ends.before[None], forward, ends.between[None], backward[::-1]])
    ends_at = np.cumsum(rows[:, GROWTH])
    starts = ends_at - rows[:, GROWTH]
    total = float(gradients.sum())
    arrived = np.zeros(len(rows))
    first_backward = len(forward) + 2
    arrived[first_backward:] = np.cumsum(gradients[::-1]) - gradients[::-1]
    if accumulates:  # gradients are there from the start, and nothing new stays
        starts = starts - arrived + total
        arrived = np.full(len(rows), total)
    at = int(np.argmax(starts + rows[:, PEAK]))
    work = rows[:, SECONDS:].sum(axis=0)
    return ComposedPass(
        peak_bytes=float(starts[at] + rows[at, PEAK]),
        saved_bytes=float(starts[at] - arrived[at]),
        transient_bytes=float(rows[at, PEAK] - rows[at, SCRATCH]),
        workspace_bytes=float(rows[at, SCRATCH]),
        gradient_bytes=float(arrived[at]),
        work=work,
        recompute=np.where(recomputes, backward - plain.backward, 0.0)[:, SECONDS:].sum(axis=0),
    )
