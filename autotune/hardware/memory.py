"""Which kind of memory a device has, and how much of it a run may take. Pure.

Capability says nothing about this: H100 (9.0) has memory of its own, Orin (8.7) has not. Two signals decide, CUDA
attribute 18 (`integrated`) and attribute 100 (`pageableMemoryAccessUsesHostPageTables`, ATS):
GB10 and Thor answer 1, 1; Orin 1, 0; GH200 and GB200 0, 1; every other card 0, 0.
"""

from autotune.errors import AutotuneError, InvalidInput
from autotune.schema import HardwareProfile, MemoryKind

GIB = 2**30
OVERRIDES: tuple[MemoryKind, ...] = ("discrete", "integrated", "coherent")
DISPLAY_RESERVE_BYTES = GIB
"""A desktop takes this much more as windows open."""
LEAST_MARGIN_BYTES = 256 * 2**20
MOST_SHARED_RESERVE_BYTES = 16 * GIB
MOST_HOST_RESERVE_BYTES = 4 * GIB
CUDA_CONTEXT_BYTES = 500 << 20
"""Context, loaded kernels and library handles of a PyTorch process: 400 to 600 MiB on recent cards."""


def memory_kind(integrated: bool | None, host_page_tables: bool | None, override: str | None) -> tuple[MemoryKind, str]:
    """The kind and why, from the two signals of a CUDA device (None: not answered).

    Raises:
        InvalidInput: `override` (AUTOTUNE_MEMORY_KIND) is none of a GPU's kinds of memory.
    """
    if override:
        for kind in OVERRIDES:
            if override == kind:
                return kind, f"set by AUTOTUNE_MEMORY_KIND={override}; measured signals ignored"
        known = ", ".join(OVERRIDES)
        raise InvalidInput(f"AUTOTUNE_MEMORY_KIND is {override!r}", hint=f"use one of: {known}; or unset it")
    signals = f"integrated {_said(integrated)}, host page tables {_said(host_page_tables)}"
    if integrated:
        return "integrated", f"{signals}: shares the host's memory"
    if host_page_tables and integrated is None:
        return "integrated", f"{signals}: taken for shared memory, the careful reading"
    if host_page_tables:
        return "coherent", f"{signals}: own memory, and the host's within reach"
    if integrated is None and host_page_tables is None:
        return "discrete", "neither signal was answered: taken for a card with its own memory"
    return "discrete", f"{signals}: memory of its own"


def _said(signal: bool | None) -> str:
    return "unknown" if signal is None else str(int(signal))


def budget(
    kind: MemoryKind, total: int | None, free: int | None, drives_display: bool | None, reserve: int | None = None
) -> tuple[int, str]:
    """What a run may take of a device, in bytes, and why. `reserve` (bytes) replaces the usual one.

    `free` is what the device has free or, where it shares the host's memory, MemAvailable: what CUDA calls free there
    ignores page cache that the kernel would give back. The reserve is an eighth of shared memory (16 GiB at most,
    because an over-allocation hangs the machine), an eighth of the host's (4 GiB at most) when the processor trains,
    and 1 GiB on a card that drives a display. Cards also keep a margin of 2%, at least 256 MiB, for fragmentation.

    Raises:
        AutotuneError: neither free nor total memory is known.
    """
    if free is None and total is None:
        raise AutotuneError(
            "neither the CUDA runtime nor NVML says how much memory the device has",
            hint="see `autotune doctor`; a GPU of the catalog can be planned for with --hardware",
        )
    most = min(size for size in (free, total) if size is not None)
    whole = total if total is not None else most
    why = f"{_gib(most)} " + ("free" if free is not None else "in total (what is free is unknown)")
    margin = 0
    if not shares_host_memory(kind):
        margin = max(LEAST_MARGIN_BYTES, whole // 50)
        why += f", less a margin of {_gib(margin)}"
    kept = usual_reserve(kind, whole, drives_display) if reserve is None else reserve
    if kept:
        why += f", less a reserve of {_gib(kept)}" + (" for the display" if drives_display and reserve is None else "")
    return max(0, most - margin - kept), why


def usual_reserve(kind: MemoryKind, whole_bytes: int, drives_display: bool | None = None) -> int:
    """What is left to others of a memory of `whole_bytes`; see `budget`."""
    if kind == "integrated":
        return min(MOST_SHARED_RESERVE_BYTES, whole_bytes // 8)
    if kind == "host":
        return min(MOST_HOST_RESERVE_BYTES, whole_bytes // 8)
    return DISPLAY_RESERVE_BYTES if drives_display else 0


def host_floor_bytes(kind: MemoryKind, whole_bytes: int, available_bytes: int) -> int:
    """What a trial must leave of the host's memory: half of its reserve, and at most a quarter of what it has left."""
    return min(usual_reserve(kind, whole_bytes) // 2, available_bytes // 4)


def shares_host_memory(kind: MemoryKind) -> bool:
    """Whether what the device takes is the host's: where running out hangs the machine before anything raises."""
    return kind in ("integrated", "host")


def process_overhead_bytes(hardware: HardwareProfile) -> int:
    """What a process takes of the device before its first tensor: measured, else a GPU's usual context."""
    measured = hardware.rate("process.overhead")
    if hardware.device.kind != "cuda":
        return 0  # the host's memory is counted on its own
    return int(measured) if measured is not None else CUDA_CONTEXT_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
