"""Collated batches ahead of the training step, and the time spent waiting for them.

Threads work ahead, not the worker processes of torch's `DataLoader`, which would break three
promises (measured with torch 2.13, 200 samples of 118 MiB): an error arrives as a `RuntimeError`
that holds a traceback as text instead of its hint; a spawned worker takes seconds to start and 231
MiB that no prediction of memory counts, and a forked one must not follow CUDA or threads. Without
workers `DataLoader` reads nothing ahead, and it has no threads.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from autotune.data.batches import MicroBatch
from autotune.data.encode import EncodedDataset
from autotune.models.family import Batch, Sample

EXTRA_BATCHES = 1
"""Batches queued beyond one per thread, so that one slow batch does not stall the step."""


@dataclass
class BatchLoader:
    """Iterable of collated micro-batches on the CPU, in the order of `batch_sampler`. Fields are
    named as in torch's `DataLoader`.

    Leaving the loop, by its end, `break` or an error, ends the threads. An error while reading is
    raised in the loop.
    """

    dataset: EncodedDataset
    batch_sampler: Iterable[MicroBatch]
    collate_fn: Callable[[Sequence[Sample]], Batch]
    num_workers: int = 1
    """Threads that work ahead; with none the loop collates by itself."""
    pin_memory: bool = False
    """Copy into page-locked memory, for asynchronous transfer to a GPU."""
    waited_seconds: float = 0.0
    """Time that the loop has waited for batches; grows as they are taken."""

    def __iter__(self) -> Iterator[Batch]:
        tasks = (partial(self._load, planned) for planned in self.batch_sampler)
        if not self.num_workers:
            yield from map(self._time, tasks)
            return
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="autotune-data") as threads:
            queue = deque(
                threads.submit(task) for task in islice(tasks, self.num_workers + EXTRA_BATCHES)
            )
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
        batch = self.collate_fn([self.dataset.sample(*draw) for draw in planned.draws])
        return (
            {name: tensor.pin_memory() for name, tensor in batch.items()}
            if self.pin_memory
            else batch
        )
