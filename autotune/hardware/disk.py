"""How fast a safetensors file comes from disk, by loader."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from autotune.hardware.system import Unanswered
from autotune.hardware.timing import Timings

LOADERS = ("safetensors", "fastsafetensors")
NUM_TENSORS = 8


def disk_timings(loader: str, file_bytes: int, device: str, limit_seconds: float) -> Timings:
    """Seconds to read a fresh file of about `file_bytes`, dropped from the page cache before every reading.

    Raises:
        Unanswered: this system cannot drop a file from its page cache, so nothing honest can be measured.
    """
    if not hasattr(os, "posix_fadvise"):
        raise Unanswered("the page cache cannot be bypassed on this system")
    read = {"safetensors": _read_mapped, "fastsafetensors": _read_fast}[loader]
    folder = platformdirs.user_cache_path("autotune")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-") as scratch:
        path = Path(scratch) / "weights.safetensors"
        write_random_weights(path, file_bytes)
        return _readings(path, lambda: read(path, device), limit_seconds)


def _readings(path: Path, read: Callable[[], object], limit_seconds: float) -> Timings:
    seconds: list[float] = []
    begin = time.perf_counter()
    read()  # the first reading imports the loader and warms the allocator
    while len(seconds) < 5 and (not seconds or time.perf_counter() - begin < limit_seconds):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return Timings(tuple(seconds))


def write_random_weights(path: Path, file_bytes: int) -> None:
    """A safetensors file of random bytes (a compressing disk gains nothing), written through to the disk."""
    size = file_bytes // NUM_TENSORS
    entries = {
        f"block.{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(NUM_TENSORS)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    noise = os.urandom(2**20)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, size * NUM_TENSORS, len(noise)):
            file.write(noise[: size * NUM_TENSORS - begin])
        file.flush()
        os.fsync(file.fileno())


def _read_mapped(path: Path, device: str) -> object:
    from safetensors.torch import load_file

    # A mapped file is read when it is touched; the copy is what training does with it.
    return [tensor.clone() for tensor in load_file(path, device=device).values()]


def _read_fast(path: Path, device: str) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(str(path), device=device, nogds=True) as file:
        return [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118 - no mapping
