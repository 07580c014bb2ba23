"""Keeps the host alive while a child tries settings: watches, from outside, how much memory the host has left.

Where device and host share memory, an over-allocation hangs the machine before anything raises; and the host's memory
also runs out on its own while weights are loaded. Nothing inside the child can be trusted to notice in time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from autotune.hardware.memory import host_floor_bytes
from autotune.schema import MemoryKind

WATCH_SECONDS = 0.02
"""Between two looks. Filling memory at 20 GB/s takes 0.4 GB meanwhile, far less than any floor."""
RETURN_SECONDS = 30.0
"""The kernel takes seconds to return a large process's memory; what is not back then is someone else's."""
STALLED_SECONDS = 1.0
NOTICEABLE_BYTES = 64 * 2**20
"""Changes below this are the machine's own noise."""


def available_bytes() -> int:
    """What the host can give without swapping (MemAvailable)."""
    return int(psutil.virtual_memory().available)


def usual_floor_bytes(device_kind: str) -> int:
    """What must stay of the host's memory as it is now."""
    kind: MemoryKind = "host" if device_kind == "cpu" else "integrated"
    return host_floor_bytes(kind, int(psutil.virtual_memory().total), available_bytes())


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
