"""What there is to train on: this machine and the catalog of GPUs."""

import re
from collections.abc import Callable

from autotune.api.amounts import MemoryAmount, memory_bytes
from autotune.hardware import (
    NOT_KEPT,
    CatalogGpu,
    Finding,
    cached_profile,
    hardware_named,
    limited_budget,
    load_catalog,
)
from autotune.hardware import doctor as diagnose
from autotune.hardware import probe as read_machine
from autotune.schema import HardwareProfile, MemoryBudget, Notice, OnEvent, PhaseStarted, StatusChanged, ignore_event
from autotune.sharing import own_store, profile_of_record

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
    on_event(PhaseStarted(name="reading the machine"))
    on_progress = _status_to(on_event)
    if quick:
        return read_machine(index=device, on_progress=on_progress)
    return cached_profile(fresh=True, index=device, on_progress=on_progress)


def hardware_for(hardware: str | HardwareProfile | None, *, on_event: OnEvent = ignore_event) -> HardwareProfile:
    """The profile to plan with: of this machine, or the one that is named.

    Args:
        hardware: None for this machine; else a profile, a catalog name, a saved probe's file or a record's name.
        on_event: listener to progress.

    Raises:
        InvalidInput: there is no such hardware.
    """
    return _this_machine(on_event) if hardware is None else _named(hardware)


def memory_budget_for(
    profile: HardwareProfile,
    *,
    num_devices: int = 1,
    max_memory: MemoryAmount | None = None,
    reserve_memory: MemoryAmount | None = None,
    cap_memory: MemoryAmount | None = None,
) -> MemoryBudget:
    """What a run may take of each device of the machine.

    Args:
        profile: of the machine's first device.
        num_devices: GPUs of this machine that train together; the budget is that of the one with the least memory.
        max_memory: the most that a run may take.
        reserve_memory: memory to leave to other programs.
        cap_memory: rehearse a device that has only so much memory.

    Raises:
        InvalidInput: an amount of memory cannot be read.
    """
    amounts = {"max_bytes": max_memory, "reserve_bytes": reserve_memory, "cap_bytes": cap_memory}
    limits = {name: memory_bytes(amount) for name, amount in amounts.items() if amount is not None}
    several = profile.device.kind == "cuda"
    others = range(1, min(num_devices, profile.device.count) if several else 1)
    devices = [profile.device, *(read_machine(index=index).device for index in others)]
    return min((limited_budget(device, **limits) for device in devices), key=lambda budget: budget.num_bytes)


def _named(hardware: str | HardwareProfile) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if RECORD_NAME.fullmatch(hardware):
        return profile_of_record(own_store().find(hardware)[1])
    return hardware_named(hardware)


def _this_machine(on_event: OnEvent) -> HardwareProfile:
    on_event(PhaseStarted(name="reading the machine"))
    profile = cached_profile(on_progress=_status_to(on_event))
    for note in profile.notes:
        if note.startswith(NOT_KEPT):
            on_event(Notice(text=note))
    return profile


def _status_to(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(StatusChanged(text=text))
