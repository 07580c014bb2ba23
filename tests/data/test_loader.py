"""The loader gives exactly the planned batches, some ahead, and leaves no thread behind."""

import threading
import time

import pytest
import torch

from autotune.data.batches import BatchLoader, BatchOrder
from autotune.errors import AutotuneError
from autotune.models.family import Sample
from autotune.models.qwen_image import QwenImage


class Data:
    """Samples whose latents say which they are."""

    def __init__(
        self, *, read_seconds: float = 0.0, fail_at: int | None = None, uneven: bool = False
    ) -> None:
        self.read_seconds, self.fail_at, self.uneven = read_seconds, fail_at, uneven
        self.num_read = 0

    def sample(
        self, index: int, dropped: bool = False, caption: int = 0, flipped: bool = False
    ) -> Sample:
        time.sleep(self.read_seconds + (0.002 * (index % 3) if self.uneven else 0))
        if self.num_read == self.fail_at:
            raise AutotuneError("lost an entry", hint="run again")
        self.num_read += 1
        return {
            "latents": torch.full((1, 1, 2, 2), float(index)),
            "prompt_embeds": torch.zeros(1 if dropped else 3, 4),
        }


ORDER = BatchOrder(
    groups=(0, 0, 0, 1, 1, 1), repeats=(1,) * 6, effective_batch_size=4, seed=0, caption_dropout=0.3
)


def loader(
    data: Data, *, steps: range = range(6), num_workers: int = 1, **process: int
) -> BatchLoader:
    batches = ORDER.batches(steps, 2, **process)
    return BatchLoader(data.sample, batches, QwenImage().collate, num_workers)


def no_thread_left() -> bool:
    return not any(thread.name.startswith("autotune-data") for thread in threading.enumerate())


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("first_step", [0, 3, 6])
def test_batches_are_the_planned_ones_from_any_step_on(first_step, num_workers):
    batches = list(loader(Data(uneven=True), steps=range(first_step, 6), num_workers=num_workers))
    planned = [
        micro.indices for step in range(first_step, 6) for micro in ORDER.micro_batches(step, 2)
    ]
    assert [tuple(int(x) for x in batch["latents"][:, 0, 0, 0, 0]) for batch in batches] == planned
    assert no_thread_left()


def test_leaving_early_ends_the_thread_and_reads_little_ahead():
    data = Data()
    for _ in loader(data, steps=range(10_000)):
        break
    assert no_thread_left()
    assert data.num_read <= 2 * 5


def test_an_error_while_reading_reaches_the_loop():
    with pytest.raises(AutotuneError, match="lost an entry"):
        list(loader(Data(fail_at=5)))
    assert no_thread_left()
