"""Which kind of memory a device has, and how much of it a run may take. Pure.

Capability says nothing about this: H100 (9.0) has memory of its own, Orin (8.7) has not. Two signals decide, CUDA
attribute 18 (`integrated`) and attribute 100 (`pageableMemoryAccessUsesHostPageTables`, ATS):
GB10 and Thor answer 1, 1; Orin 1, 0; GH200 and GB200 0, 1; every other card 0, 0.
"""

from autotune.errors import AutotuneError, InvalidInput
from autotune.machine import MemoryKind

GIB = 2**30
MEMORY_KINDS: tuple[MemoryKind, ...] = ("discrete", "integrated", "coherent", "host")
DISPLAY_RESERVE_BYTES = GIB
"""A desktop takes this much more as windows open."""
MOST_SHARED_RESERVE_BYTES = 16 * GIB
MOST_HOST_RESERVE_BYTES = 4 * GIB


def memory_kind(integrated: bool | None, host_page_tables: bool | None, override: str | None) -> tuple[MemoryKind, str]:
    """The kind and why, from the two signals of a CUDA device (None: not answered).

    Raises:
        InvalidInput: `override` (AUTOTUNE_MEMORY_KIND) is no kind of memory.
    """
    if override:
        for kind in MEMORY_KINDS:
            if override == kind:
                return kind, f"set by AUTOTUNE_MEMORY_KIND={override}; measured signals ignored"
        known = ", ".join(MEMORY_KINDS)
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


def own_memory_budget(
    total: int | None, free: int | None, drives_display: bool | None, reserve: int | None
) -> tuple[int, str]:
    """Budget in bytes and why, on a device with memory of its own.

    The margin (2%, at least 256 MiB) is for what fragmentation and the driver take; `reserve` (bytes) replaces the
    one for a display.

    Raises:
        AutotuneError: neither free nor total memory is known.
    """
    known = free if free is not None else total
    if known is None:
        raise AutotuneError(
            "neither the CUDA runtime nor NVML says how much memory the device has",
            hint="see `autotune doctor`; a machine without a working GPU can be planned for with --hardware",
        )
    basis = "free" if free is not None else "in total (what is free is unknown)"
    margin = max(256 * 2**20, (total or known) // 50)
    kept = reserve if reserve is not None else (DISPLAY_RESERVE_BYTES if drives_display else 0)
    why = f"{_gib(known)} {basis}, less a margin of {_gib(margin)}"
    if kept:
        why += f" and a reserve of {_gib(kept)}" + (" for the display" if reserve is None else "")
    return max(0, known - margin - kept), why


def shared_memory_budget(total: int | None, available: int, reserve: int | None) -> tuple[int, str]:
    """Budget in bytes and why, on a device that shares the host's memory: an over-allocation hangs the machine.

    What CUDA calls free ignores page cache that the kernel would give back, so MemAvailable counts instead. The
    reserve is an eighth of all memory, at most 16 GiB.
    """
    kept = reserve if reserve is not None else min(MOST_SHARED_RESERVE_BYTES, (total or available) // 8)
    most = available if total is None else min(total, available)
    return max(0, most - kept), f"{_gib(most)} available on the host, less a reserve of {_gib(kept)}"


def host_budget(total: int, available: int, reserve: int | None) -> tuple[int, str]:
    """Budget in bytes and why, when the processor trains. The reserve is an eighth of all memory, at most 4 GiB."""
    kept = reserve if reserve is not None else min(MOST_HOST_RESERVE_BYTES, total // 8)
    return max(0, available - kept), f"{_gib(available)} available, less a reserve of {_gib(kept)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
