"""Collated batches one ahead of the training step, from a thread of their own, and the time spent waiting for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from autotune.families.base import Batch, Family
from autotune.training.data.batches import MicroBatch, Order
from autotune.training.data.encoded import EncodedDataset

AHEAD = 2
"""Batches that lie ready: one would do if every batch took equally long."""

PLANNED_STEPS = 32


@dataclass(frozen=True)
class LoadedBatch:
    """One micro-batch on the CPU."""

    step: int
    """The optimizer step it belongs to, from 0."""
    batch: Batch
    is_last: bool
    """Whether the optimizer steps after it."""


@dataclass
class Loader:
    """Iterable of the micro-batches of steps `first_step` up to `num_steps`; `waited_seconds` grows as it is used.

    Leaving the loop, by its end, `break` or an error, ends the thread. An error while reading is raised in the loop.
    """

    family: Family
    data: EncodedDataset
    order: Order
    micro_batch_size: int
    num_steps: int
    first_step: int = 0
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False
    """Copy into page-locked memory, for asynchronous transfer to a GPU."""
    prefetch: bool = True
    """Whether a thread works ahead. Where samples only have to be stacked it costs more than it saves: 3% of a step of
    the demo, as the two threads take turns at the interpreter."""
    waited_seconds: float = 0.0

    def __iter__(self) -> Iterator[LoadedBatch]:
        loads = self._loads()
        if not self.prefetch:
            while (loaded := self._timed(partial(next, loads, None))) is not None:
                yield loaded
            return
        with ThreadPoolExecutor(1, thread_name_prefix="autotune-data") as thread:
            ready = deque(thread.submit(next, loads, None) for _ in range(AHEAD))
            try:
                while (loaded := self._timed(ready.popleft().result)) is not None:
                    ready.append(thread.submit(next, loads, None))
                    yield loaded
            finally:
                thread.shutdown(cancel_futures=True)

    def _timed(self, load: Callable[[], LoadedBatch | None]) -> LoadedBatch | None:
        started = time.perf_counter()
        loaded = load()
        self.waited_seconds += time.perf_counter() - started
        return loaded

    def _loads(self) -> Iterator[LoadedBatch]:
        """Runs in the thread, where there is one."""
        for step, planned in self._planned():
            for number, micro_batch in enumerate(planned, start=1):
                yield LoadedBatch(step, self._collated(micro_batch), is_last=number == len(planned))

    def _planned(self) -> Iterator[tuple[int, Sequence[MicroBatch]]]:
        """Many steps at a time: a processor that has just run a model takes four times as long for a single one."""
        for start in range(self.first_step, self.num_steps, PLANNED_STEPS):
            steps = range(start, min(start + PLANNED_STEPS, self.num_steps))
            plan = partial(self.order.micro_batches, rank=self.rank, world_size=self.world_size)
            yield from [(step, plan(step, self.micro_batch_size)) for step in steps]

    def _collated(self, planned: MicroBatch) -> Batch:
        pairs = zip(planned.indices, planned.dropped, strict=True)
        batch = self.family.collate([self.data.sample(index, dropped=dropped) for index, dropped in pairs])
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pin_memory else batch
