"""Keeps the host alive while a child tries settings: watches, from outside, how much memory the host has left.

Where device and host share memory, an over-allocation hangs the machine before anything raises; and the host's memory
also runs out on its own while weights are loaded. Nothing inside the child can be trusted to notice in time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import psutil

from autotune.hardware import host_floor_bytes, memory_bytes, memory_limits
from autotune.schema import MemoryKind

WATCH_SECONDS = 0.02
"""Between two looks. Filling memory at 20 GB/s takes 0.4 GB meanwhile, far less than any floor."""
RETURN_SECONDS = 30.0
"""The kernel takes seconds to return a large process's memory; what is not back then is someone else's."""
STALLED_SECONDS = 1.0
NOTICEABLE_BYTES = 64 * 2**20
"""Changes below this are the machine's own noise."""


def available_bytes() -> int:
    """What the host can give without swapping or, where that is less, the container or the job that this runs in."""
    limits = memory_limits() if _is_limited() else ()
    return min((host_available_bytes(), *(left for _, left in limits)))


@cache
def _is_limited() -> bool:
    """Whether such a limit holds here: reading them all takes 0.3 ms, too long for every look."""
    return bool(memory_limits())


def host_available_bytes() -> int:
    """What the whole host can give without swapping (MemAvailable)."""
    return int(psutil.virtual_memory().available)


@dataclass
class Watchdog:
    """Says when a child must die for the host's sake, and when the next may start."""

    floor_bytes: int
    available: Callable[[], int] = available_bytes

    def alarm(self) -> str | None:
        """Why the child must be ended now; None while all is well."""
        left = self.available()
        if left >= self.floor_bytes:
            return None
        return (
            f"the host had {left / 2**30:.1f} GiB left, less than the {self.floor_bytes / 2**30:.1f} GiB that keep it "
            "alive: the trial was ended"
        )

    def wait_for_return(self, wanted_bytes: int) -> None:
        """Wait until `wanted_bytes` are available again, or no more comes back."""
        started = rising = time.monotonic()
        most = self.available()
        while most < wanted_bytes - NOTICEABLE_BYTES:
            time.sleep(WATCH_SECONDS)
            now, left = time.monotonic(), self.available()
            if left > most + NOTICEABLE_BYTES:
                most, rising = left, now
            if now - rising > STALLED_SECONDS or now - started > RETURN_SECONDS:
                return


def usual_watchdog(kind: MemoryKind) -> Watchdog:
    """For trials on a device with that kind of memory. What CUDA takes of shared memory no container's limit holds."""
    total, available = memory_bytes(), available_bytes
    if kind == "integrated":
        total, available = int(psutil.virtual_memory().total), host_available_bytes
    return Watchdog(host_floor_bytes("host" if kind == "host" else "integrated", total, available()), available)
