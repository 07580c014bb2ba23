"""What there is to train on: this machine and the catalog of GPUs."""

import re
from collections.abc import Callable

from autotune.api.amounts import MemoryAmount, memory_bytes
from autotune.hardware import (
    NO_BF16,
    NOT_SAVED,
    CatalogGpu,
    Finding,
    cached_profile,
    diagnose,
    hardware_named,
    load_catalog,
    with_budget,
    with_cap,
    with_reserve,
)
from autotune.hardware import probe as read_machine
from autotune.schema import HardwareProfile, Notice, OnEvent, StatusChanged, ignore_event
from autotune.sharing import hardware_from_record, user_store

RECORD_NAME = re.compile(r"[0-9a-f]{8,64}")
"""A shared record's name, or how it begins."""


def doctor() -> tuple[Finding, ...]:
    """What on this machine will hurt, worst first, each with the fix. Needs no torch and no GPU context.

    Example:
        >>> for finding in autotune.doctor():
        ...     print(finding.severity, finding.what)
    """
    return diagnose()


def list_gpus() -> tuple[CatalogGpu, ...]:
    """The GPUs that can be planned for without owning one, by compute capability.

    Example:
        >>> [gpu.id for gpu in autotune.list_gpus()]
    """
    return load_catalog()


def probe(*, quick: bool = False, device: int = 0, on_event: OnEvent = ignore_event) -> HardwareProfile:
    """Find out what this machine can do, and keep the measured rates for later plans.

    Args:
        quick: read facts only; measure nothing and keep nothing.
        device: index of the GPU, if there are several.
        on_event: listener to progress.

    Raises:
        InvalidInput: there is no such device.
        AutotuneError: the amount of memory cannot be found out.

    Example:
        >>> machine = autotune.probe()
        >>> machine.device.name, machine.device.budget_bytes
    """
    on_event(StatusChanged(text="reading the machine"))
    on_progress = _status_to(on_event)
    if quick:
        return read_machine(index=device, on_progress=on_progress)
    return cached_profile(fresh=True, index=device, on_progress=on_progress)


def hardware_for(
    hardware: str | HardwareProfile | None,
    *,
    num_devices: int = 1,
    max_memory: MemoryAmount | None = None,
    reserve_memory: MemoryAmount | None = None,
    cap_memory: MemoryAmount | None = None,
    on_event: OnEvent = ignore_event,
) -> HardwareProfile:
    """The profile to plan with: of this machine, or the one that is named.

    Args:
        hardware: None for this machine; else a profile, a catalog name or enough of one (`4090`), a saved probe's file
            or a record's name.
        num_devices: GPUs that train together; the budget is that of the one with the least memory.
        max_memory: the most that a run may take.
        reserve_memory: memory to leave to other programs.
        cap_memory: rehearse a device that has only so much memory.
        on_event: listener to progress.

    Raises:
        InvalidInput: there is no such hardware, or an amount of memory cannot be read.
    """
    named = hardware is not None
    profile = _named(hardware, on_event) if hardware is not None else _this_machine(on_event)
    for note in profile.notes:
        if note.startswith((NOT_SAVED, NO_BF16)):
            on_event(Notice(text=note))

    def limited(profile: HardwareProfile) -> HardwareProfile:
        if reserve_memory is not None:
            profile = with_reserve(profile, memory_bytes(reserve_memory))
        if cap_memory is not None:
            profile = with_cap(profile, memory_bytes(cap_memory))
        if max_memory is not None:
            profile = with_budget(profile, memory_bytes(max_memory), by_user=True)
        return profile

    profile = limited(profile)
    several = not named and profile.device.kind == "cuda"
    for index in range(1, min(num_devices, profile.device.count) if several else 1):
        profile = with_budget(profile, limited(read_machine(index=index)).device.budget_bytes)
    return profile


def _named(hardware: str | HardwareProfile, on_event: OnEvent) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if RECORD_NAME.fullmatch(hardware):
        file, record = user_store().find(hardware)
        return hardware_from_record(file.name, record)
    profile = hardware_named(hardware)
    if profile.origin == "catalog" and profile.datasheet and profile.datasheet.id != hardware.lower():
        on_event(Notice(text=f"planning for {profile.datasheet.id}"))  # a part of the name was enough
    return profile


def _this_machine(on_event: OnEvent) -> HardwareProfile:
    on_event(StatusChanged(text="reading the machine"))
    return cached_profile(on_progress=_status_to(on_event))


def _status_to(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(StatusChanged(text=text))
