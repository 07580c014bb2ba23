"""Which kind of memory a device has, and how much of it a run may use. Pure.

Compute capability does not tell: H100 (9.0) has its own memory, Orin (8.7) has not. Two CUDA
attributes decide, 18 (`integrated`) and 100 (`pageableMemoryAccessUsesHostPageTables`, ATS): they
are 1, 1 on GB10 and Thor, 1, 0 on Orin, 0, 1 on GH200 and GB200, and 0, 0 on every other card.
"""

from typing import Any

from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.hardware import Device, MemoryBudget, MemoryKind, shares_host_memory

GIB = 2**30
OVERRIDES: tuple[MemoryKind, ...] = ("discrete", "integrated", "coherent")
DISPLAY_RESERVE_BYTES = GIB
"""A desktop takes this much more as windows open."""
MIN_MARGIN_BYTES = 256 * 2**20
MAX_SHARED_RESERVE_BYTES = 16 * GIB
MAX_HOST_RESERVE_BYTES = 4 * GIB


def classify_memory(
    integrated: bool | None, host_page_tables: bool | None, override: str | None
) -> tuple[MemoryKind, str]:
    """The kind and why, from the two attributes of a CUDA device (None: unknown).

    Raises:
        InvalidInput: `override` (AUTOTUNE_MEMORY_KIND) is none of a GPU's kinds of memory.
    """
    if override:
        for kind in OVERRIDES:
            if override == kind:
                return kind, f"set by AUTOTUNE_MEMORY_KIND={override}; measured signals ignored"
        known = ", ".join(OVERRIDES)
        raise InvalidInput(
            f"AUTOTUNE_MEMORY_KIND is {override!r}", hint=f"use one of: {known}; or unset it"
        )
    if integrated is None and host_page_tables is None:
        return "discrete", "neither signal is known: assumed to be a card with its own memory"
    values = (
        "unknown" if signal is None else int(signal) for signal in (integrated, host_page_tables)
    )
    signals = "integrated {}, host page tables {}".format(*values)
    if integrated:
        return "integrated", f"{signals}: shares the host's memory"
    if host_page_tables and integrated is None:
        return "integrated", f"{signals}: assumed to share the host's memory, to be safe"
    if host_page_tables:
        return "coherent", f"{signals}: its own memory, with access to the host's"
    return "discrete", f"{signals}: its own memory"


def compute_budget(
    kind: MemoryKind,
    total: int | None,
    free: int | None,
    drives_display: bool | None,
    reserve: int | None = None,
) -> tuple[int, str]:
    """How many bytes of a device a run may use, and why. `reserve` (bytes) replaces the default
    one.

    `free` is what the device has free, or MemAvailable if it shares the host's memory: what CUDA
    calls free there ignores page cache that the kernel would give back. The reserve is an eighth of
    shared memory (16 GiB at most, because an over-allocation hangs the machine), an eighth of the
    host's (4 GiB at most) when the CPU trains, and 1 GiB on a card that drives a display. Cards
    also keep a margin of 2%, at least 256 MiB, for fragmentation.

    Raises:
        AutotuneError: neither free nor total memory is known.
    """
    if free is None and total is None:
        raise AutotuneError(
            "neither the CUDA runtime nor NVML reports how much memory the device has",
            hint="see `autotune doctor`; a GPU of the catalog can be planned for with --hardware",
        )
    available = min(size for size in (free, total) if size is not None)
    whole = total if total is not None else available
    why = f"{_gib(available)} " + (
        "free" if free is not None else "in total (what is free is unknown)"
    )
    margin = 0
    if not shares_host_memory(kind):
        margin = max(MIN_MARGIN_BYTES, whole // 50)
        why += f", less a margin of {_gib(margin)}"
    reserved = default_reserve_bytes(kind, whole, drives_display) if reserve is None else reserve
    if reserved:
        for_display = " for the display" if drives_display and reserve is None else ""
        why += f", less a reserve of {_gib(reserved)}{for_display}"
    return max(0, available - margin - reserved), why


def device_with_budget(memory_kind: MemoryKind, **facts: Any) -> Device:
    """The device with these facts, fields of `Device`, and the budget that follows from them."""
    sizes = (
        facts.get(name) for name in ("total_memory_bytes", "free_memory_bytes", "drives_display")
    )
    budget_bytes, why = compute_budget(memory_kind, *sizes)
    return Device(memory_kind=memory_kind, budget_bytes=budget_bytes, budget_reason=why, **facts)


def limited_budget(
    device: Device,
    *,
    max_bytes: int | None = None,
    reserve_bytes: int | None = None,
    cap_bytes: int | None = None,
) -> MemoryBudget:
    """What a run may use of the device under the limits that a user sets.

    Args:
        device: as the probe found it.
        max_bytes: the most that a run may use.
        reserve_bytes: bytes to leave to other programs instead of the default reserve.
        cap_bytes: total memory of a smaller device to rehearse, less the default reserve and
            margin.
    """
    total, free, found = device.total_memory_bytes, device.free_memory_bytes, device.budget
    if reserve_bytes is not None:
        num_bytes, _ = compute_budget(
            device.memory_kind, total, free, device.drives_display, reserve_bytes
        )
        found = MemoryBudget(num_bytes=num_bytes, is_set_by_user=True)
    if cap_bytes is not None and (total is None or cap_bytes < total):
        left = min(cap_bytes, free or cap_bytes)
        num_bytes, _ = compute_budget(device.memory_kind, cap_bytes, left, device.drives_display)
        found = MemoryBudget(num_bytes=min(num_bytes, found.num_bytes), is_set_by_user=True)
    if max_bytes is not None and max_bytes < found.num_bytes:
        found = MemoryBudget(num_bytes=max_bytes, is_set_by_user=True)
    return found


def default_reserve_bytes(
    kind: MemoryKind, total_bytes: int, drives_display: bool | None = None
) -> int:
    """How much of a memory of `total_bytes` is left to other processes; see `compute_budget`."""
    if kind == "integrated":
        return min(MAX_SHARED_RESERVE_BYTES, total_bytes // 8)
    if kind == "host":
        return min(MAX_HOST_RESERVE_BYTES, total_bytes // 8)
    return DISPLAY_RESERVE_BYTES if drives_display else 0


def host_floor_bytes(kind: MemoryKind, total_bytes: int, available_bytes: int) -> int:
    """Host memory that a trial must leave available: half of the reserve, at most a quarter of
    what is available."""
    return min(default_reserve_bytes(kind, total_bytes) // 2, available_bytes // 4)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
