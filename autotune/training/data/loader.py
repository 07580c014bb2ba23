"""Collated batches one ahead of the training step, from a thread of their own, and the time spent waiting for them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Full, Queue

from autotune.families.base import Batch, Family
from autotune.training.data.batches import MicroBatch, Order
from autotune.training.data.encoded import EncodedDataset

AHEAD = 2
"""Batches that lie ready: one would do if every batch took equally long."""


@dataclass(frozen=True)
class LoadedBatch:
    """One micro-batch on the CPU."""

    step: int
    """The optimizer step it belongs to, from 0."""
    batch: Batch
    weight: float
    """Factor of its mean loss within the step."""
    num_images: int
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
    waited_seconds: float = 0.0

    def __iter__(self) -> Iterator[LoadedBatch]:
        queue: Queue[LoadedBatch | BaseException | None] = Queue(AHEAD)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(queue, stop), name="autotune-data", daemon=True)
        thread.start()
        try:
            while (loaded := self._wait(queue)) is not None:
                if isinstance(loaded, BaseException):
                    raise loaded
                yield loaded
        finally:
            stop.set()
            thread.join()

    def _wait(self, queue: "Queue[LoadedBatch | BaseException | None]") -> LoadedBatch | BaseException | None:
        started = time.perf_counter()
        loaded = queue.get()
        self.waited_seconds += time.perf_counter() - started
        return loaded

    def _fill(self, queue: "Queue[LoadedBatch | BaseException | None]", stop: threading.Event) -> None:
        try:
            for step in range(self.first_step, self.num_steps):
                planned = self.order.micro_batches(
                    step, self.micro_batch_size, rank=self.rank, world_size=self.world_size
                )
                for number, micro_batch in enumerate(planned, start=1):
                    loaded = self._load(step, micro_batch, is_last=number == len(planned))
                    if not _put(queue, loaded, stop):
                        return
            _put(queue, None, stop)
        except BaseException as error:  # raised again by the consumer
            _put(queue, error, stop)

    def _load(self, step: int, planned: MicroBatch, *, is_last: bool) -> LoadedBatch:
        pairs = zip(planned.indices, planned.dropped, strict=True)
        batch = self.family.collate([self.data.sample(index, dropped=dropped) for index, dropped in pairs])
        if self.pin_memory:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return LoadedBatch(step, batch, planned.weight, len(planned.indices), is_last)


def _put(
    queue: "Queue[LoadedBatch | BaseException | None]",
    loaded: LoadedBatch | BaseException | None,
    stop: threading.Event,
) -> bool:
    """Wait for room; False when nobody will take it any more."""
    while not stop.is_set():
        try:
            queue.put(loaded, timeout=0.1)
        except Full:
            continue
        return True
    return False
