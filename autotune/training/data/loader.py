"""Collated batches one ahead of the training step, from threads of their own, and the time spent waiting for them."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from autotune.families.base import Batch, Family
from autotune.training.data.batches import MicroBatch, Order
from autotune.training.data.encoded import EncodedDataset

AHEAD = 1
"""Batches that lie ready for each thread, beside one: without it every batch would have to take equally long."""


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

    Leaving the loop, by its end, `break` or an error, ends the threads. An error while reading is raised in the loop.
    """

    family: Family
    data: EncodedDataset
    order: Order
    micro_batch_size: int
    num_steps: int
    first_step: int = 0
    rank: int = 0
    world_size: int = 1
    num_workers: int = 1
    pin_memory: bool = False
    """Copy into page-locked memory, for asynchronous transfer to a GPU."""
    waited_seconds: float = 0.0

    def __iter__(self) -> Iterator[LoadedBatch]:
        planned = self._planned()
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="autotune-data") as threads:
            ready = deque(threads.submit(self._load, *one) for one in islice(planned, self.num_workers + AHEAD))
            try:
                while ready:
                    loaded = self._wait(ready.popleft())
                    ready.extend(threads.submit(self._load, *one) for one in islice(planned, 1))
                    yield loaded
            finally:
                threads.shutdown(cancel_futures=True)

    def _wait(self, future: "Future[LoadedBatch]") -> LoadedBatch:
        started = time.perf_counter()
        loaded = future.result()
        self.waited_seconds += time.perf_counter() - started
        return loaded

    def _planned(self) -> Iterator[tuple[int, MicroBatch, bool]]:
        for step in range(self.first_step, self.num_steps):
            planned = self.order.micro_batches(step, self.micro_batch_size, rank=self.rank, world_size=self.world_size)
            for number, micro_batch in enumerate(planned, start=1):
                yield step, micro_batch, number == len(planned)

    def _load(self, step: int, planned: MicroBatch, is_last: bool) -> LoadedBatch:
        """Runs in a thread."""
        pairs = zip(planned.indices, planned.dropped, strict=True)
        batch = self.family.collate([self.data.sample(index, dropped=dropped) for index, dropped in pairs])
        if self.pin_memory:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return LoadedBatch(step, batch, is_last)
