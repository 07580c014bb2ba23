"""Measures memory: a work's peak by the device's allocator, and what the process holds."""

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the distinct storages behind `tensors`, looking inside quantized ones."""
    seen: dict[int, int] = {}
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            # a DTensor names its mesh, too
            pending.extend(part for part in inner if isinstance(part, torch.Tensor))
        else:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def measure_peak_memory(
    device: torch.device, live: Callable[[], Iterable[torch.Tensor]], work: Callable[[], T]
) -> tuple[T, int]:
    """Return the result of `work`, and its peak of bytes on `device`, `live` tensors included. On
    CUDA the caching allocator keeps count. On CPU the profiler's allocation events are added up on
    top of the tensors that are live before; that is slow, so the work must not be timed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device)
    base = tensor_bytes(live())  # a list of them would keep what `work` frees, as block swap does
    if device.type != "cpu":
        result = work()
        return result, max(base, torch.mps.current_allocated_memory())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = work()
    current = peak = 0
    events = profile.profiler.kineto_results.events() if profile.profiler else []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, base + peak


def release_memory() -> None:
    """Collect garbage, and return its memory to the device and the system."""
    gc.collect()
    trim_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Have glibc return free pages below small allocations: malloc_trim(3), a millisecond. Without
    it the heap grew to several times the model while quantizing. A no-op elsewhere."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


# glibc's number for the size in bytes from which malloc maps a buffer by itself, mallopt(3).
M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 1 << 20
# What glibc raises that size to, as ever larger buffers are freed, and no further.
MAX_HEAP_BYTES = 32 << 20


@contextlib.contextmanager
def map_large_buffers() -> Iterator[None]:
    """Have glibc map buffers of 1 MiB and more, which go back to the system once they are freed. In
    the heap they leave holes: decoding took 1 to 3 times its tensors, another figure each time.
    Afterwards buffers of up to 32 MiB come from the heap again, which is faster."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(M_MMAP_THRESHOLD, MAPPED_BYTES)
    try:
        yield
    finally:
        set_option(M_MMAP_THRESHOLD, MAX_HEAP_BYTES)


def drop_mapped_pages(tensor: torch.Tensor) -> None:
    """Have Linux drop the pages below a mapped, unwritten tensor: MADV_DONTNEED, madvise(2). The
    file may be open still; a later look would read them again."""
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if size := max(0, end // mmap.PAGESIZE * mmap.PAGESIZE - first):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


# By process id, because a fork has another; cached, because creating one would slow short steps.
_process = functools.cache(psutil.Process)


# In proc_pid_smaps(5) the line of a mapping ends with its file; those of its sizes follow.
RESIDENT_KIB_OF_LIBRARY = re.compile(
    rb"\.so(?:\.\d+)*(?: \(deleted\))?\n(?:\S+: .*\n){1,4}?Rss: +(\d+) kB"
)


def library_bytes() -> int:
    """Count resident pages of shared libraries, on Linux: 15 ms, and 50 to 150 ms for each GiB.

    They are no part of what a run needs: all processes share them, they can be dropped and read
    again, and a fork maps only those that it uses, 100 MiB fewer than a process that imported them.
    """
    if sys.platform != "linux":
        return 0
    sizes_kib = RESIDENT_KIB_OF_LIBRARY.findall(Path("/proc/self/smaps").read_bytes())
    return sum(map(int, sizes_kib)) * 1024


# By process id: until when (monotonic) a count of `library_bytes` holds, and the count.
_recent_library_bytes: dict[int, tuple[float, int]] = {}
MIN_SECONDS_BETWEEN_LOOKS = 1.0
# Of the time. A look at each short step would slow it; without new looks, libraries that steps
# first use would seem to be growth.
MAX_SHARE_OF_LOOKS = 0.02


def resident_bytes() -> int:
    """Count resident memory of this process, without shared libraries as they were a moment ago."""
    until, libraries = _recent_library_bytes.get(os.getpid(), (0.0, 0))
    if time.monotonic() > until:
        libraries = _look_at_libraries()
    return int(_process(os.getpid()).memory_info().rss) - libraries


def _look_at_libraries() -> int:
    started, libraries, ended = time.monotonic(), library_bytes(), time.monotonic()
    wait = max(MIN_SECONDS_BETWEEN_LOOKS, (ended - started) / MAX_SHARE_OF_LOOKS)
    _recent_library_bytes[os.getpid()] = (ended + wait, libraries)
    return libraries


def host_peak_bytes() -> int:
    """Return the peak of `resident_bytes` since `reset_host_peak`; a fork has its parent's."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 - _look_at_libraries()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_host_peak() -> None:
    """Reset the peak of resident memory, if the system can: 5 in clear_refs, proc(5)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def device_peak_bytes(device: torch.device) -> int | None:
    """Return the peak of allocated device memory since it was reset; None on CPU. MPS keeps none:
    what is allocated now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return torch.mps.current_allocated_memory() if device.type == "mps" else None


def allocated_bytes(device: torch.device) -> int:
    """Count the bytes allocated on `device` now; on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return resident_bytes()
