"""Order of samples in optimizer steps, cut into micro-batches, and their loader.

The order is a function of seed, data and effective batch size alone. Neither the micro-batch size
nor the number of processes changes which images a step sees, so tuning, a fallback or a second GPU
never changes what is learned.

Steps are cut from the endless sequence of epochs, so no image is lost to a remainder. Within an
epoch the images of a bucket are shuffled, and each run of the sequence takes as many images of one
bucket, chosen at random in proportion to what it has left, as the open step still needs. So a step
mixes buckets only if one of them runs out, or where two epochs meet. Its images of one bucket form
micro-batches of sizes as even as possible, and each weighs by its size.
"""

import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby, islice, pairwise
from typing import NamedTuple

from autotune.data.items import Item
from autotune.errors import InvalidInput
from autotune.models.family import Batch, Sample
from autotune.plan.workload import Bucket

FLIP_SHARE = 0.5  # share of images that are mirrored, with `flip`
PLANNED_STEPS = 32  # planning a single step right after a model pass took four times as long


class Draw(NamedTuple):
    """One image as it is seen once."""

    item: int
    dropped: bool = False
    caption: int = 0
    flipped: bool = False
    is_prior: bool = False  # the base's prediction is preserved, of its prior caption


Chunk = Sequence[Draw]


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together."""

    draws: tuple[Draw, ...]
    # Of its mean loss: its share of this process's part of the step. Averaging gradients over
    # processes then gives the mean over the effective batch.
    weight: float

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(draw.item for draw in self.draws)


@dataclass(frozen=True)
class BatchOrder:
    """The endless order in which a dataset is trained on."""

    groups: tuple[int, ...]
    repeats: tuple[int, ...]  # number of times that each item is seen per epoch
    effective_batch_size: int  # images per optimizer step, over all processes
    seed: int
    caption_dropout: float = 0.0  # drawn anew each time an image is seen
    num_captions: tuple[int, ...] = ()  # of each item, one of which is drawn; empty for one each
    flip: bool = False
    preserve_prior: float = 0.0  # share of images that preserve the base's prediction
    num_prior_captions: tuple[int, ...] = ()  # of each item, one of which is drawn

    @cached_property
    def epoch_size(self) -> int:
        return sum(self.repeats)

    @property
    def epoch_steps(self) -> int:
        return math.ceil(self.epoch_size / self.effective_batch_size)

    def images(self, step: int) -> tuple[Draw, ...]:
        start, size = step * self.effective_batch_size, self.epoch_size
        positions = range(start, start + self.effective_batch_size)
        return tuple(self._epoch(position // size)[position % size] for position in positions)

    @cached_property
    def _epoch(self) -> Callable[[int], Chunk]:
        """All images of an epoch by its number; a few are cached, since a step may span several."""
        return lru_cache(maxsize=4)(partial(_shuffle_epoch, self))

    def micro_batches(
        self, step: int, micro_batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> tuple[MicroBatch, ...]:
        """Plan one process's part of a step; `world_size` must divide the effective batch."""
        share = self.effective_batch_size // world_size
        images = sorted(self.images(step), key=self._group)
        parts = [
            self._cut(images[start : start + share], micro_batch_size)
            for start in range(0, len(images), share)
        ]
        chunks = _split_to(parts[rank], max(len(part) for part in parts))
        return tuple(MicroBatch(tuple(chunk), len(chunk) / share) for chunk in chunks)

    def batches(
        self, steps: range, micro_batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> Iterator[MicroBatch]:
        for start in range(0, len(steps), PLANNED_STEPS):
            planned = [
                self.micro_batches(step, micro_batch_size, rank=rank, world_size=world_size)
                for step in steps[start : start + PLANNED_STEPS]
            ]
            yield from chain.from_iterable(planned)

    def _group(self, image: Draw) -> tuple[int, bool]:
        # Only what preserves the prior passes through the base, so it has micro-batches of its own.
        return self.groups[image.item], image.is_prior

    def _cut(self, images: Chunk, micro_batch_size: int) -> list[Chunk]:
        parts: list[Chunk] = []
        for _, members in groupby(images, key=self._group):
            group = tuple(members)
            parts += _even_parts(group, math.ceil(len(group) / micro_batch_size))
        return parts


def _shuffle_epoch(order: BatchOrder, epoch: int) -> Chunk:
    rng = random.Random(f"{order.seed} order {epoch}")
    dropout, captions, flips, priors = (
        random.Random(f"{order.seed} {name} {epoch}")
        for name in ("dropout", "captions", "flips", "priors")
    )
    remaining: defaultdict[int, list[int]] = defaultdict(list)
    for index, (group, repeats) in enumerate(zip(order.groups, order.repeats, strict=True)):
        remaining[group] += [index] * repeats
    groups = sorted(remaining)
    for group in groups:
        rng.shuffle(remaining[group])
    sequence: list[int] = []
    size = order.effective_batch_size
    while len(sequence) < order.epoch_size:
        needed = size - (epoch * order.epoch_size + len(sequence)) % size
        chosen = remaining[rng.choices(groups, [len(remaining[group]) for group in groups])[0]]
        sequence += chosen[:needed]
        del chosen[:needed]
    draws = (
        Draw(
            index,
            dropped=dropout.random() < order.caption_dropout,
            caption=captions.randrange(order.num_captions[index]) if order.num_captions else 0,
            flipped=order.flip and flips.random() < FLIP_SHARE,
        )
        for index in sequence
    )
    if not order.preserve_prior:
        return tuple(draws)

    def with_prior(draw: Draw) -> Draw:
        caption = priors.randrange(order.num_prior_captions[draw.item])
        return draw._replace(dropped=False, caption=caption, is_prior=True)

    share = order.preserve_prior
    return tuple(with_prior(draw) if priors.random() < share else draw for draw in draws)


def _even_parts(images: Chunk, number: int) -> list[Chunk]:
    bounds = [len(images) * part // number for part in range(number + 1)]
    return [images[start:end] for start, end in pairwise(bounds)]


def _split_to(chunks: list[Chunk], number: int) -> list[Chunk]:
    """Halve the largest chunks until there are `number`: all processes must take equally many."""
    while len(chunks) < number:
        largest = max(range(len(chunks)), key=lambda index: len(chunks[index]))
        chunks = [*chunks[:largest], *_even_parts(chunks[largest], 2), *chunks[largest + 1 :]]
    return chunks


MAX_ASPECT_RATIO = 4.0  # models were not trained on longer strips
# Sizes differ by 64 px at 1024, as kohya's `bucket_reso_steps`: finer steps crop less, but scatter
# a small dataset over many shapes, each with a remainder and a recompile of its own.
STEPS_PER_SIDE = 16


@lru_cache(maxsize=64)
def list_bucket_sizes(
    resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[tuple[int, int], ...]:
    """List (width, height): multiples of `multiple_px` with at most `resolution_px` squared pixels.
    For each width the greatest height that fits, in portrait orientation as well, and the greatest
    square. Raises InvalidInput if the resolution is smaller than one multiple."""
    if resolution_px < multiple_px:
        what = f"a resolution of {resolution_px} px is too small for this model"
        raise InvalidInput(what, hint=f"use at least {multiple_px} px")
    step = multiple_px * max(1, resolution_px // (STEPS_PER_SIDE * multiple_px))
    square = resolution_px // step * step
    sizes = {(square, square)}
    for width in range(step, int(resolution_px * math.sqrt(MAX_ASPECT_RATIO)) + 1, step):
        height = resolution_px**2 // width // step * step
        if (
            height
            and max(width / height, height / width) <= MAX_ASPECT_RATIO
            and max(width, height) <= max_side_px
        ):
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def choose_bucket_size(
    width: int, height: int, resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[int, int]:
    """Choose the closest aspect ratio; of equals the one with more pixels, then the squarer one."""
    sizes = list_bucket_sizes(resolution_px, multiple_px, max_side_px)
    return min(sizes, key=lambda size: _distance(width, height, *size))


def _distance(
    width: int, height: int, to_width: int, to_height: int
) -> tuple[float, int, int, int]:
    ratio = abs(math.log(width * to_height / (height * to_width)))
    return round(ratio, 9), -to_width * to_height, max(to_width, to_height), to_width


def make_buckets(
    items: Sequence[Item], resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[Bucket, ...]:
    """Make sorted buckets of items, by closest shape and number of frames, with their counts."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for item in items:
        size = item.width_px, item.height_px
        width, height = choose_bucket_size(*size, resolution_px, multiple_px, max_side_px)
        counts[width, height, item.num_frames] += 1
    return tuple(
        Bucket(width_px=width, height_px=height, num_frames=frames, num_items=number)
        for (width, height, frames), number in sorted(counts.items())
    )


def assign_buckets(items: Sequence[Item], buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Find each item's bucket of the closest aspect ratio, else raise InvalidInput."""
    chosen = []
    for item in items:
        distances = {
            index: _distance(item.width_px, item.height_px, bucket.width_px, bucket.height_px)
            for index, bucket in enumerate(buckets)
            if bucket.num_frames == item.num_frames
        }
        if not distances:
            what = f"{item.path.name} has {item.num_frames} frame(s), no planned shape has so many"
            raise InvalidInput(what, hint="plan again with this data: autotune plan --data DIR")
        chosen.append(min(distances, key=distances.__getitem__))
    return tuple(chosen)


EXTRA_BATCHES = 1  # queued beyond one per thread, so that one slow batch does not stall the step


@dataclass
class BatchLoader:
    """Collated micro-batches on the CPU; fields are named as in torch's `DataLoader`."""

    read_sample: Callable[..., Sample]
    batch_sampler: Iterable[MicroBatch]
    collate_fn: Callable[[Sequence[Sample]], Batch]
    num_workers: int = 1
    pin_memory: bool = False
    waited_seconds: float = 0.0  # time that the loop has waited for batches so far

    def __iter__(self) -> Iterator[Batch]:
        tasks = (partial(self._load, planned) for planned in self.batch_sampler)
        if not self.num_workers:
            yield from map(self._time, tasks)
            return
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="autotune-data") as threads:
            first = islice(tasks, self.num_workers + EXTRA_BATCHES)
            queue = deque(threads.submit(task) for task in first)
            try:
                while queue:
                    batch = self._time(queue.popleft().result)
                    queue.extend(threads.submit(task) for task in islice(tasks, 1))
                    yield batch
            finally:
                threads.shutdown(cancel_futures=True)

    def _time(self, load: Callable[[], Batch]) -> Batch:
        started = time.perf_counter()
        batch = load()
        self.waited_seconds += time.perf_counter() - started
        return batch

    def _load(self, planned: MicroBatch) -> Batch:
        batch = self.collate_fn([self.read_sample(*draw) for draw in planned.draws])
        if self.pin_memory:
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch
