"""How fast a safetensors file is read from disk or from the page cache, by the loaders that
training uses."""

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save

from autotune.machine.system import Unavailable
from autotune.machine.timing import Timings, time_calls
from autotune.system.files import cache_path
from autotune.weights.files import open_weights
from autotune.weights.tensors import LOADERS

NUM_TENSORS = 8
MAX_SAMPLES = 5
PAGE_BYTES = 4096


def time_reads(
    loader: str, file_bytes: int, device: torch.device, limit_seconds: float, *, cold: bool = True
) -> Timings:
    """Time reading a fresh file of `file_bytes`; if `cold`, it is dropped from the page cache
    before every reading.

    Raises:
        Unavailable: the loader cannot be used here, or the page cache cannot be bypassed, so that
            nothing honest can be measured.
    """
    reason = LOADERS[loader].why_not(device)
    if reason or not hasattr(os, "posix_fadvise"):
        raise Unavailable(reason or "the page cache cannot be bypassed on this system")
    folder = cache_path()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(
        dir=folder
    ) as file:  # nameless: it disappears with this process, however that ends
        file.write(_random_weights(file_bytes))
        file.flush()
        os.fsync(file.fileno())
        source = open_weights(Path(f"/proc/self/fd/{file.fileno()}"))

        def read() -> None:
            # A memory-mapped tensor is read when it is touched, a page at a time.
            for _, tensor in LOADERS[loader].stream(source, device):
                tensor[::PAGE_BYTES].sum().item()

        def drop() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        return time_calls(
            read, limit_seconds=limit_seconds, setup=drop if cold else None, max_samples=MAX_SAMPLES
        )


def _random_weights(num_bytes: int) -> bytes:
    """A safetensors file of random bytes, which a compressing disk cannot shrink."""
    noise = torch.randint(0, 256, (NUM_TENSORS, num_bytes // NUM_TENSORS), dtype=torch.uint8)
    return save({f"block.{i}": noise[i].clone() for i in range(NUM_TENSORS)})
