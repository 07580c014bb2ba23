"""The order of training data: which samples make up each optimizer step. Pure planning of indices.

The order is a function of seed, data and effective batch size alone. Neither the micro-batch size nor the number of
processes changes which images a step sees, so tuning, a fallback or a second GPU never changes what is learned.

An epoch shows every image `repeats` times. Steps are cut from the endless row of epochs, so a step may span two
epochs and no image is lost to a remainder. Within an epoch the images of a bucket are shuffled, and the row is built
in runs that end where steps end: each run takes as many images of one bucket, chosen at random in proportion to what
it has left, as the open step still needs. So a step mixes buckets only where one of them runs out, or at the seam of
two epochs; its images of one bucket then form micro-batches of as even a size as possible, and each weighs by its size.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise

Chunk = Sequence[tuple[int, bool]]
"""Images as (index, caption dropped)."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together."""

    indices: tuple[int, ...]
    dropped: tuple[bool, ...]
    """For each sample whether its caption is dropped."""
    weight: float
    """Share of this process's part of the step: the factor of its mean loss. The weights of a step sum to 1 on every
    process, and averaging gradients over processes then gives the mean over the effective batch."""


@dataclass(frozen=True)
class Order:
    """The endless order of a dataset.

    Args:
        groups: for each item the group (bucket) it may share a batch with.
        repeats: for each item how often it is seen per epoch.
        effective_batch_size: images per optimizer step, over all processes.
        seed: of the shuffle and of caption dropout.
        caption_dropout: probability that a caption is dropped, drawn anew each time an image is seen.
    """

    groups: tuple[int, ...]
    repeats: tuple[int, ...]
    effective_batch_size: int
    seed: int
    caption_dropout: float = 0.0

    @cached_property
    def epoch_size(self) -> int:
        """Images per epoch, repeats included."""
        return sum(self.repeats)

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps that an epoch takes, the last of them perhaps shared with the next."""
        return math.ceil(self.epoch_size / self.effective_batch_size)

    def images(self, step: int) -> tuple[tuple[int, bool], ...]:
        """(index, caption dropped) of every image of one step, in the order seen."""
        position, end = step * self.effective_batch_size, (step + 1) * self.effective_batch_size
        images: list[tuple[int, bool]] = []
        while position < end:
            epoch, offset = divmod(position, self.epoch_size)
            images += self._layout(epoch)[offset : offset + end - position]
            position = step * self.effective_batch_size + len(images)
        return tuple(images)

    @cached_property
    def _layout(self) -> Callable[[int], Chunk]:
        """Epochs by number; the last few are kept, as a step may span several."""
        return lru_cache(maxsize=4)(partial(_epoch, self))

    def micro_batches(
        self, step: int, micro_batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> tuple[MicroBatch, ...]:
        """What one process computes in one step; every process gets equally many images and micro-batches.

        `world_size` divides the effective batch: `describe.require_even_shares` has seen to it.
        """
        share = self.effective_batch_size // world_size
        images = sorted(self.images(step), key=lambda image: self.groups[image[0]])
        parts = [
            _chunks(self.groups, images[start : start + share], micro_batch_size)
            for start in range(0, len(images), share)
        ]
        chunks = _split_to(parts[rank], max(len(part) for part in parts))
        return tuple(
            MicroBatch(tuple(index for index, _ in chunk), tuple(drop for _, drop in chunk), len(chunk) / share)
            for chunk in chunks
        )


def _epoch(order: Order, epoch: int) -> Chunk:
    """All images of one epoch in order."""
    rng = random.Random(f"{order.seed} order {epoch}")
    dropout = random.Random(f"{order.seed} dropout {epoch}")
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for index, (group, repeats) in enumerate(zip(order.groups, order.repeats, strict=True)):
        waiting[group] += [index] * repeats
    groups = sorted(waiting)
    for group in groups:
        rng.shuffle(waiting[group])
    row: list[int] = []
    size = order.effective_batch_size
    while len(row) < order.epoch_size:
        needed = size - (epoch * order.epoch_size + len(row)) % size
        chosen = waiting[rng.choices(groups, [len(waiting[group]) for group in groups])[0]]
        row += chosen[:needed]
        del chosen[:needed]
    return tuple((index, dropout.random() < order.caption_dropout) for index in row)


def _chunks(groups: Sequence[int], images: Chunk, micro_batch_size: int) -> list[Chunk]:
    """Images sorted by group, cut within each group into the fewest even parts of at most `micro_batch_size`."""
    chunks: list[Chunk] = []
    start = 0
    for number in Counter(groups[index] for index, _ in images).values():
        chunks += _even_parts(images[start : start + number], -(-number // micro_batch_size))
        start += number
    return chunks


def _even_parts(images: Chunk, number: int) -> list[Chunk]:
    bounds = [len(images) * part // number for part in range(number + 1)]
    return [images[start:end] for start, end in pairwise(bounds)]


def _split_to(chunks: list[Chunk], number: int) -> list[Chunk]:
    """Halve the largest chunks until there are `number`: processes must run in step."""
    while len(chunks) < number:
        largest = max(range(len(chunks)), key=lambda index: len(chunks[index]))
        chunks = [*chunks[:largest], *_even_parts(chunks[largest], 2), *chunks[largest + 1 :]]
    return chunks
