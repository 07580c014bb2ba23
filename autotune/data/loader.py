"""Collated batches one ahead of the training step, from threads of their own, and the time spent waiting for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from autotune.data.batches import MicroBatch, Order
from autotune.data.encode import EncodedDataset
from autotune.families import Batch, Family

AHEAD = 1
"""Batches queued beyond one per thread, so that one slow batch does not stall the step."""
PLANNED_STEPS = 32


@dataclass(frozen=True)
class LoadedBatch:
    """One micro-batch on the CPU."""

    batch: Batch
    is_last: bool
    """Whether the optimizer steps after it."""


@dataclass
class BatchLoader:
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
    """Threads that work ahead; with none the loop collates by itself."""
    pin_memory: bool = False
    """Copy into page-locked memory, for asynchronous transfer to a GPU."""
    waited_seconds: float = 0.0

    def __iter__(self) -> Iterator[LoadedBatch]:
        planned = self._planned()
        if not self.num_workers:
            yield from (self._timed(partial(self._load, *one)) for one in planned)
            return
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="autotune-data") as threads:
            ready = deque(threads.submit(self._load, *one) for one in islice(planned, self.num_workers + AHEAD))
            try:
                while ready:
                    loaded = self._timed(ready.popleft().result)
                    ready.extend(threads.submit(self._load, *one) for one in islice(planned, 1))
                    yield loaded
            finally:
                threads.shutdown(cancel_futures=True)

    def _timed(self, load: Callable[[], LoadedBatch]) -> LoadedBatch:
        started = time.perf_counter()
        loaded = load()
        self.waited_seconds += time.perf_counter() - started
        return loaded

    def _planned(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Plans `PLANNED_STEPS` at a time: planning a single step right after a model pass took four times as long."""
        share = partial(self.order.micro_batches, rank=self.rank, world_size=self.world_size)
        for start in range(self.first_step, self.num_steps, PLANNED_STEPS):
            steps = range(start, min(start + PLANNED_STEPS, self.num_steps))
            for planned in [share(step, self.micro_batch_size) for step in steps]:
                for number, micro_batch in enumerate(planned, start=1):
                    yield micro_batch, number == len(planned)

    def _load(self, planned: MicroBatch, is_last: bool) -> LoadedBatch:
        """Runs in a thread, where there are any."""
        pairs = zip(planned.indices, planned.dropped, strict=True)
        batch = self.family.collate([self.data.sample(index, dropped=dropped) for index, dropped in pairs])
        if self.pin_memory:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return LoadedBatch(batch, is_last)
