"""Which numbers of blocks go together: for each setting of the other knobs, the mixtures that the
cost model prefers.

How many blocks recompute everything, how many keep attention, and for how many the weights wait on
the host: a model of 60 blocks has tens of thousands of such mixtures.
Their memory and time are arithmetic on traced blocks, so all of them are predicted at once, and
only those are kept that nothing beats in both:

- of mixtures that use the same means, those on the frontier of memory and time; whatever trials
  teach moves them alike, so what is behind the frontier stays behind it. Of the frontier, enough
  that neighbors differ by `MAX_STEP`;
- of different means, those that others beat by less than the model doubts their ratio.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.cost.calibration import time_doubt
from autotune.cost.predict import BLOCK_NUMBERS, CostModel
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import Candidate
from autotune.search.space import SearchSpace

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_STEP = 0.05
"""Most by which neighbors on a frontier differ in memory, as a share of the activations of a
pass that keeps all; less than one block makes no step."""
NUM_STEPS = 30
"""Values of each number of blocks that are looked at: steps of 3%, finer than `MAX_STEP`."""


@dataclass(frozen=True)
class Mixtures:
    """Predicted mixtures of one setting of the other knobs."""

    numbers: Integers
    """(mixtures, 3): numbers of blocks in the order of `BLOCK_NUMBERS`."""
    num_bytes: Floats
    seconds: Floats

    def __getitem__(self, chosen: Any) -> "Mixtures":
        return Mixtures(self.numbers[chosen], self.num_bytes[chosen], self.seconds[chosen])


def with_mixtures(space: SearchSpace, cost: CostModel) -> SearchSpace:
    """The space with, in place of each candidate, its mixtures of numbers of blocks."""
    found: dict[Candidate, None] = {}
    for base in space.candidates:
        found.update(dict.fromkeys(find_mixtures(base, space.choices, cost)))
    cost.prepare(found)
    return replace(space, candidates=tuple(found))


def find_mixtures(
    base: Candidate, choices: Mapping[str, Sequence[Any]], cost: CostModel
) -> list[Candidate]:
    """The mixtures of one setting of the other knobs that are worth trying, of admitted
    `choices` by knob."""
    plain = base.changed(**dict.fromkeys(BLOCK_NUMBERS, 0))
    admitted = {
        name: _without_conflict(name, choices[name], base, cost.context) for name in BLOCK_NUMBERS
    }
    passes, swapped = (
        _passes(admitted, cost.workload.model.num_blocks),
        _spread(admitted["swapped_blocks"]),
    )
    num_bytes, seconds = cost.predict_mixtures(plain, passes, swapped)
    can_swap = swapped[None] <= passes[:, :1] + passes[:, 1:2]
    at, column = np.nonzero(can_swap)
    numbers = np.concatenate([passes[at], swapped[column][:, None]], axis=1)
    everything = Mixtures(numbers, num_bytes[at, column], seconds[at, column])
    step = MAX_STEP * cost.activation_bytes(plain)
    kept = _drop_beaten([_thin(_frontier(group), step) for group in _by_means(everything)], plain)
    same = {name: value for name, value in plain if name not in BLOCK_NUMBERS}
    # Not validated again, which would take most of the time: the rest is valid, and the numbers are
    # admitted ones.
    return [
        Candidate.model_construct(None, **same, **dict(zip(BLOCK_NUMBERS, row, strict=True)))
        for group in kept
        for row in group.numbers.tolist()
    ]


def _without_conflict(
    name: str, numbers: Sequence[int], base: Candidate, context: TuningContext
) -> Integers:
    """The numbers of one knob that can go with the other knobs' values, if enough blocks
    recompute."""
    deep = {"checkpointed_blocks": context.workload.model.num_blocks - 1}
    tried = base.changed(**{**dict.fromkeys(BLOCK_NUMBERS, 0), **deep, name: 1})
    is_barred = any(knob.conflict(tried, context) for knob in KNOBS)
    return np.array(
        [number for number in sorted(numbers) if not (number and is_barred)], dtype=np.int64
    )


def _passes(admitted: Mapping[str, Integers], num_blocks: int) -> Integers:
    """(passes, 2): numbers of checkpointed and selective blocks that leave the last block alone."""
    levels = [_spread(admitted[name]) for name in BLOCK_NUMBERS[:2]]
    whole, selective = (grid.ravel() for grid in np.meshgrid(*levels, indexing="ij"))
    rest = num_blocks - 1 - levels[0]  # with which all but the last block recompute
    is_admitted = np.isin(rest, admitted["selective_blocks"])
    whole = np.concatenate([whole, levels[0][is_admitted]])
    selective = np.concatenate([selective, rest[is_admitted]])
    passes = np.unique(np.stack([whole, selective], axis=1), axis=0)
    fits = passes.sum(axis=1) < max(num_blocks, 1 + whole.min())
    return np.compress(fits, passes, axis=0)


def _spread(numbers: Integers) -> Integers:
    """At most `NUM_STEPS` of them, ends included."""
    chosen: Integers = numbers[
        np.unique(np.round(np.linspace(0, len(numbers) - 1, NUM_STEPS)).astype(np.int64))
    ]
    return chosen


def _by_means(mixtures: Mixtures) -> Iterator[Mixtures]:
    """Mixtures that have the same terms in calibration: that use the same means, if more or less
    of them."""
    whole, selective, swapped = (mixtures.numbers > 0).T
    means = (whole | selective) + 2 * selective + 4 * swapped
    for value in np.unique(means):
        yield mixtures[means == value]


def _frontier(mixtures: Mixtures) -> Mixtures:
    """Those that no other beats in memory and time, by growing memory and shrinking time."""
    ordered = mixtures[np.lexsort((mixtures.seconds, mixtures.num_bytes))]
    before = np.minimum.accumulate(np.concatenate([[np.inf], ordered.seconds[:-1]]))
    return ordered[ordered.seconds < before]


def _thin(frontier: Mixtures, step_bytes: float) -> Mixtures:
    """From the largest on, the smallest that is within a step, or the next if none is."""
    at = len(frontier.num_bytes) - 1
    chosen = [at]
    while at > 0:
        within = int(np.searchsorted(frontier.num_bytes, frontier.num_bytes[at] - step_bytes))
        at = min(within, at - 1)
        chosen.append(at)
    return frontier[chosen]


def _drop_beaten(groups: Sequence[Mixtures], plain: Candidate) -> list[Mixtures]:
    """Each group less what another group beats in memory and, beyond what is doubtful of their
    ratio, in time."""
    first = [
        plain.changed(**dict(zip(BLOCK_NUMBERS, map(int, group.numbers[0]), strict=True)))
        for group in groups
    ]
    left = []
    for one, group in zip(first, groups, strict=True):
        beaten = np.zeros(len(group.seconds), dtype=bool)
        for other, rival in zip(first, groups, strict=True):
            if other is not one:
                within = rival.num_bytes[None] <= group.num_bytes[:, None]
                best = np.where(within, rival.seconds[None], np.inf).min(axis=1)
                beaten |= best * np.exp(time_doubt(one, other)) < group.seconds
        left.append(group[~beaten])
    return left
