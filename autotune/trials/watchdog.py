"""Keeps the host alive while a child tries settings: watches, from the parent, how much memory the
host has left.

If device and host share memory, an over-allocation hangs the machine before anything raises; and
the host's memory also runs out on its own while weights are loaded. Nothing inside the child can be
trusted to notice in time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from autotune.hardware import available_bytes, host_available_bytes, host_floor_bytes, memory_bytes
from autotune.schema import MemoryKind

POLL_SECONDS = 0.02
"""Between two looks. Filling memory at 20 GB/s takes 0.4 GB meanwhile, far less than any floor."""
MAX_WAIT_SECONDS = 30.0
"""The kernel takes seconds to return a large process's memory; what is not back by then belongs
to another process.
"""
MAX_STALL_SECONDS = 1.0
NOISE_BYTES = 64 * 2**20
"""Smaller changes are the machine's own noise."""


@dataclass
class Watchdog:
    """Says when a child must be ended for the host's sake, and when the next may start."""

    floor_bytes: int
    """What the host needs to stay alive."""
    available: Callable[[], int] = available_bytes

    def find_shortage(self) -> str | None:
        """Why the child must be ended now; None while the host has enough memory."""
        left = self.available()
        if left >= self.floor_bytes:
            return None
        return (
            f"the host had {left / 2**30:.1f} GiB left, less than the "
            f"{self.floor_bytes / 2**30:.1f} GiB that keep it "
            "alive: the trial was ended"
        )

    def wait_for_memory(self, wanted_bytes: int) -> None:
        """Wait until `wanted_bytes` are available, or until no more memory comes back."""
        started = rising = time.monotonic()
        largest = self.available()
        while largest < wanted_bytes - NOISE_BYTES:
            time.sleep(POLL_SECONDS)
            now, left = time.monotonic(), self.available()
            if left > largest + NOISE_BYTES:
                largest, rising = left, now
            if now - rising > MAX_STALL_SECONDS or now - started > MAX_WAIT_SECONDS:
                return


def default_watchdog(kind: MemoryKind) -> Watchdog:
    """For trials on a device with that kind of memory. No container's limit holds what CUDA
    takes of shared memory.
    """
    total, available = memory_bytes(), available_bytes
    if kind == "integrated":
        total, available = int(psutil.virtual_memory().total), host_available_bytes
    return Watchdog(
        host_floor_bytes("host" if kind == "host" else "integrated", total, available()), available
    )
