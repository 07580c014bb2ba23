"""How fast a safetensors file comes from disk or from the page cache, through the loaders that training uses."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from autotune.hardware.system import Unavailable
from autotune.hardware.timing import Timings, timed
from autotune.weights import LOADERS, open_weights

if TYPE_CHECKING:
    import torch

NUM_TENSORS = 8
MOST_READINGS = 5
PAGE_BYTES = 4096


def disk_timings(
    loader: str, file_bytes: int, device: "torch.device", limit_seconds: float, *, cold: bool = True
) -> Timings:
    """Seconds to read a fresh file of `file_bytes`; `cold`, dropped from the page cache before every reading.

    Raises:
        Unavailable: the loader cannot be used here, or the page cache cannot be bypassed, so that nothing honest can
            be measured.
    """
    reason = LOADERS[loader].unavailable_reason(device)
    if reason or not hasattr(os, "posix_fadvise"):
        raise Unavailable(reason or "the page cache cannot be bypassed on this system")
    folder = platformdirs.user_cache_path("autotune")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:  # nameless: gone with this process, however it ends
        file.write(_random_weights(file_bytes))
        file.flush()
        os.fsync(file.fileno())
        source = open_weights(Path(f"/proc/self/fd/{file.fileno()}"))

        def read() -> None:
            # A mapped tensor is read when it is touched, a page at a time.
            for _, tensor in LOADERS[loader].stream(source, device):
                tensor[::PAGE_BYTES].sum().item()

        def forget() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        return timed(read, limit_seconds=limit_seconds, before=forget if cold else None, most=MOST_READINGS)


def _random_weights(num_bytes: int) -> bytes:
    """A safetensors file of random bytes: a compressing disk gains nothing."""
    import torch
    from safetensors.torch import save

    noise = torch.randint(0, 256, (NUM_TENSORS, num_bytes // NUM_TENSORS), dtype=torch.uint8)
    return save({f"block.{i}": noise[i].clone() for i in range(NUM_TENSORS)})
