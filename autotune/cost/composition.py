"""From traced segments to a model of any depth: levels of live memory along the pass, and their
peak.

A pass is a row of segments: what comes before the blocks, each block forward, what comes between
(output layers and loss), each block backward. Each segment changes the level of live bytes by its
growth and rises above its start by its peak, so the peak of the whole pass is the largest level
plus segment peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune.cost.recorder import Segment
from autotune.cost.timing import Rates, seconds_by_class
from autotune.cost.trace import TracePass

PLAIN, SELECTIVE, WHOLE = 0, 1, 2
"""What a block keeps: all that its backward pass needs, the output of attention, or its input
alone."""
GROWTH, PEAK, SCRATCH, SECONDS = 0, 1, 2, 3
"""Columns of a segment's vector: bytes, bytes, bytes, then seconds by class and the number of
launches."""


@dataclass(frozen=True)
class PassTable:
    """A traced pass as vectors, each of (growth, peak, scratch, seconds by class ..., launches)."""

    before: NDArray[np.float64]
    forward: NDArray[np.float64]
    """(blocks, columns)"""
    between: NDArray[np.float64]
    backward: NDArray[np.float64]
    """(blocks, columns), in the order that blocks run forward."""

    def stretched(self, index: Sequence[int]) -> "PassTable":
        """To the full model, of each of whose blocks `index` names the traced one that stands
        for it."""
        index = list(index)
        backward = self.backward[index] if len(self.backward) else self.backward
        return PassTable(self.before, self.forward[index], self.between, backward)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """By class, of the whole pass."""
        rows = np.concatenate([self.before[None], self.forward, self.between[None], self.backward])
        by_class: NDArray[np.float64] = rows[:, SECONDS:-1].sum(axis=0)
        return by_class

    def plus(self, share: float, start: "PassTable", end: "PassTable") -> "PassTable":
        """This table and `share` of the way from `start` to `end`."""
        parts = (
            getattr(self, name) + share * (getattr(end, name) - getattr(start, name))
            for name in PARTS
        )
        return PassTable(*parts)


PARTS = tuple(each.name for each in fields(PassTable))


def table_of(traced: TracePass, rates: Rates, rank: int) -> PassTable:
    """Turn segments into vectors, with seconds at this machine's rates."""

    def vector(segment: Segment) -> list[float]:
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
    work: NDArray[np.float64]
    """Seconds by class, then launches."""
    forward: NDArray[np.float64]
    """The share of `work` before the blocks run backward."""
    recompute: NDArray[np.float64]
    """The share of `work` that repeats operations."""


@dataclass(frozen=True)
class ComposedPasses:
    """Several of them: each field as in `ComposedPass`, one entry or row for each."""

    peak_bytes: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    transient_bytes: NDArray[np.float64]
    workspace_bytes: NDArray[np.float64]
    gradient_bytes: NDArray[np.float64]
    work: NDArray[np.float64]
    forward: NDArray[np.float64]
    recompute: NDArray[np.float64]

    def __getitem__(self, at: int) -> ComposedPass:
        return ComposedPass(**{each.name: getattr(self, each.name)[at] for each in fields(self)})


class BlockTables:
    """Tables of one model whose blocks keep everything, the output of attention, and their input
    alone.

    Args:
        tables: stretched, in this order; the last block may keep everything in all of them.
        gradients: bytes of each block's adapter gradients, in the order that blocks run.
    """

    def __init__(self, tables: Sequence[PassTable], gradients: NDArray[np.float64]) -> None:
        self.num_blocks, self.gradients = len(gradients), gradients
        self.rows = np.stack(
            [
                np.concatenate([t.before[None], t.forward, t.between[None], t.backward[::-1]])[
                    :, :SECONDS
                ]
                for t in tables
            ]
        )
        """(kinds, segments in the order of the pass, columns)"""
        self.outside_work = np.stack([(t.before + t.between)[SECONDS:] for t in tables])
        work = np.stack([(t.forward + t.backward)[:, SECONDS:] for t in tables])
        again = np.stack([(t.backward - tables[PLAIN].backward)[:, SECONDS:] for t in tables])
        self.work_rows, self.again_rows = np.concatenate(work), np.concatenate(again)
        """(kinds x blocks, classes)"""
        self.forward = tables[PLAIN].forward[:, SECONDS:].sum(axis=0)
        """(classes,): blocks run forward in the same way, whatever they keep."""


def compose(tables: BlockTables, mixtures: NDArray[np.int64], accumulates: bool) -> ComposedPasses:
    """Levels and work of passes that differ in what their blocks keep.

    Args:
        tables: of the model; none of a kind that has no block need be there.
        mixtures: (mixtures, 2): number of blocks that keep their input alone, and of those after
            them that keep attention.
        accumulates: whether gradients of an earlier micro-batch are already there.
    """
    blocks, gradients = tables.num_blocks, tables.gradients
    number = np.arange(blocks)
    whole, selective = (column[:, None] for column in mixtures.T)
    kinds = np.where(number < whole, WHOLE, np.where(number < whole + selective, SELECTIVE, PLAIN))
    ends = np.where(whole > 0, WHOLE, np.where(selective > 0, SELECTIVE, PLAIN))
    of_segment = np.concatenate([ends, kinds, ends, kinds[:, ::-1]], axis=1)
    segments = np.arange(of_segment.shape[1])
    growth, peak, scratch = (
        tables.rows[:, :, column][of_segment, segments] for column in (GROWTH, PEAK, SCRATCH)
    )
    first_backward = blocks + 2
    starts = np.cumsum(growth, axis=1) - growth
    arrived = np.zeros(growth.shape[1])
    arrived[first_backward:] = np.cumsum(gradients[::-1]) - gradients[::-1]
    if accumulates:  # gradients are there from the start, and nothing new stays
        starts = starts - arrived + gradients.sum()
        arrived[:] = gradients.sum()
    at = np.argmax(starts + peak, axis=1)
    one = np.arange(len(mixtures)), at
    is_kind = np.concatenate([kinds == kind for kind in range(len(tables.rows))], axis=1).astype(
        np.float64
    )
    return ComposedPasses(
        peak_bytes=starts[one] + peak[one],
        saved_bytes=starts[one] - arrived[at],
        transient_bytes=peak[one] - scratch[one],
        workspace_bytes=scratch[one],
        gradient_bytes=arrived[at],
        # One row at a time: the last bits of a product of matrices depend on how many rows it has.
        work=tables.outside_work[ends[:, 0]] + (is_kind[:, None] @ tables.work_rows)[:, 0],
        forward=tables.outside_work[ends[:, 0]] + tables.forward,
        recompute=(is_kind[:, None] @ tables.again_rows)[:, 0],
    )
