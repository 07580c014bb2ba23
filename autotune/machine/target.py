"""The machine that a plan is for, this one or one that is named, and what a run may use of it."""

from collections.abc import Callable, Collection

from autotune.errors import InvalidInput
from autotune.events import Notice, OnEvent, StatusChanged, ignore_event
from autotune.machine.capabilities import NO_BF16, limit_device
from autotune.machine.catalog import with_assumed_packages, with_host_memory
from autotune.machine.probe import NOT_SAVED, cached_profile, hardware_named, probe
from autotune.plan.amounts import memory_bytes
from autotune.plan.hardware import HardwareProfile
from autotune.plan.request import PlanRequest


def hardware_for(
    hardware: str | HardwareProfile | None,
    *,
    host_memory: int | str | None = None,
    assume: Collection[str] = (),
    on_event: OnEvent = ignore_event,
    on_facts: Callable[[HardwareProfile], None] = lambda facts: None,
) -> HardwareProfile:
    """Return the profile to plan with: of this machine, or the one that is named.

    `host_memory` and `assume` describe the host and the packages of a card of the catalog;
    `on_facts` gets what is read of this machine before anything is measured.

    Raises:
        InvalidInput: there is no such hardware.
    """
    if isinstance(hardware, HardwareProfile):
        profile = hardware
    elif hardware is not None:
        profile = hardware_named(hardware)
        sheet = profile.datasheet
        if profile.origin == "catalog" and sheet and sheet.id != hardware.lower():
            on_event(Notice(text=f"planning for {sheet.id}"))  # a part of the name was enough
    else:
        on_event(StatusChanged(text="reading the machine"))
        profile = cached_profile(on_progress=status_to(on_event), on_facts=on_facts)
    if host_memory is not None:
        profile = with_host_memory(profile, memory_bytes(host_memory))
    if assume:
        profile = with_assumed_packages(profile, assume)
    for note in profile.notes:
        if note.startswith((NOT_SAVED, NO_BF16)):
            on_event(Notice(text=note))
    return profile


def with_earlier_packages(
    profile: HardwareProfile, assumed: Collection[str], on_event: OnEvent
) -> HardwareProfile:
    """Return a card with those packages of an earlier plan's card that it can run."""
    kept = []
    for name in assumed:
        try:
            with_assumed_packages(profile, (name,))
            kept.append(name)
        except InvalidInput as error:
            on_event(Notice(text=f"the earlier plan assumed {name}: {error.message}"))
    return with_assumed_packages(profile, kept) if kept else profile


def limit_memory(profile: HardwareProfile, request: PlanRequest) -> HardwareProfile:
    """Return the profile with what a run may use of each of the devices that train together: the
    one with the least memory decides."""
    amounts = {
        "max_bytes": request.max_memory,
        "reserve_bytes": request.reserve_memory,
        "cap_bytes": request.cap_memory,
    }
    limits = {name: memory_bytes(amount) for name, amount in amounts.items() if amount is not None}
    own = profile.device
    devices = [own]
    if request.is_local and request.num_gpus > 1 and own.kind == "cuda":
        others = set(range(min(request.num_gpus, own.count))) - {own.index}
        devices += [probe(index=index).device for index in sorted(others)]
    limited = [limit_device(device, **limits) for device in devices]
    smallest = min(limited, key=lambda device: device.budget_bytes)
    budget = {name: value for name, value in smallest if name.startswith("budget_")}
    return profile.changed(device=own.changed(**budget))


def status_to(on_event: OnEvent) -> Callable[[str], None]:
    """Return a listener to texts that tells them as events."""
    return lambda text: on_event(StatusChanged(text=text))
