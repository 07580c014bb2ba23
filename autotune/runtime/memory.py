"""Measures the peak memory of a stretch of work, by the device's own allocator."""

import contextlib
import functools
import gc
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from autotune.runtime.quiet import stderr_in

T = TypeVar("T")


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`, looking inside quantized ones."""
    seen: dict[int, int] = {}
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            pending.extend(part for part in inner if isinstance(part, torch.Tensor))  # a DTensor names its mesh, too
        else:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def with_peak_memory(
    device: torch.device, live: Callable[[], Iterable[torch.Tensor]], work: Callable[[], T]
) -> tuple[T, int]:
    """What `work` gives, and the peak of allocated bytes on `device` meanwhile, with what is `live` before counted in.

    On CUDA the caching allocator keeps count by itself. On CPU the profiler's allocation events are added up on top of
    what is live already; that slows the work down, so don't time it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device)
    base = tensor_bytes(live())  # a list of them would keep what `work` lets go, such as swapped blocks
    if device.type != "cpu":
        result = work()
        return result, max(base, torch.mps.current_allocated_memory())
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Kineto writes to the terminal whatever one sets.
    with stderr_in(os.devnull), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = work()
    current = peak = 0
    events = profile.profiler.kineto_results.events() if profile.profiler else []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, base + peak


def give_back_memory() -> None:
    """Collect what nothing refers to any more, and give its device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def host_memory_bytes() -> int:
    """Resident memory of this process now."""
    return int(_process(os.getpid()).memory_info().rss)


_process = functools.cache(psutil.Process)
"""By its id, as a forked child has another; kept, because making one takes longer than a short step should wait."""


SHARED_LIBRARY = re.compile(r"\.so(\.\d+)*$")


def host_peak_bytes() -> int:
    """Largest resident memory of this process so far, or since `forget_host_peak`. A fork starts with its parent's.

    On Linux pages of shared libraries are left out: all processes share them, they can be dropped and read again, and a
    fork has only those that it ran into, 100 MiB fewer than a process that imported them.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            maps = _process(os.getpid()).memory_maps()
            return int(line.split()[1]) * 1024 - sum(file.rss for file in maps if SHARED_LIBRARY.search(file.path))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_host_peak() -> None:
    """Count the largest resident memory anew, where the system can: Linux after a 5 is written here, proc(5)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def device_peak_bytes(device: torch.device) -> int | None:
    """Peak of allocated device memory since it was counted anew; on MPS, which keeps no count, what is held now.

    None on CPU, where the process's memory tells.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return torch.mps.current_allocated_memory() if device.type == "mps" else None


def allocated_bytes(device: torch.device) -> int:
    """What this process holds on `device` now; on CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return host_memory_bytes()
