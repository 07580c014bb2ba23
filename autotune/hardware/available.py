"""How much memory the host can still give. Light: a process that watches it loads little else."""

from functools import cache

import psutil

from autotune.hardware.sources import memory_limits


def available_bytes() -> int:
    """What the host, and any container or job that this process runs in, can give without swapping."""
    limits = memory_limits() if _is_limited() else ()
    return min((host_available_bytes(), *(left for _, left in limits)))


@cache
def _is_limited() -> bool:
    """Whether a container or a job limits memory: reading the limits takes 0.3 ms, too long for every look."""
    return bool(memory_limits())


def host_available_bytes() -> int:
    """What the whole host can give without swapping (MemAvailable)."""
    return int(psutil.virtual_memory().available)
