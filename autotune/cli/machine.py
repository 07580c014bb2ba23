"""Which machine a command is about, from its options."""

import re
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.schema import HardwareProfile

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(text: str) -> int:
    """Bytes of `20GiB`, `900 MiB` or `20GB`.

    Raises:
        InvalidInput: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", text)
    unit = UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise InvalidInput(f"{text!r} is no amount of memory", hint="write it like 20GiB or 900MiB")
    return int(float(match.group(1)) * unit)


def machine_for(
    hardware: str | None,
    *,
    num_devices: int = 1,
    max_memory: str | None = None,
    reserve: str | None = None,
    cap_memory: str | None = None,
) -> "HardwareProfile":
    """The named hardware, or this machine; with the budget that the options leave on each of its first `num_devices`.

    Raises:
        InvalidInput: there is no such hardware, or an option is no size.
    """
    from autotune.cli.terminal import err
    from autotune.hardware import NOT_SAVED, cached_profile, hardware_named, probe, with_budget, with_cap, with_reserve
    from autotune.reporting import note_text

    if hardware is not None:
        machine = _shared(hardware) or hardware_named(hardware)
    else:
        with err.status("reading the machine") as status:
            machine = cached_profile(on_progress=status.update)
        for note in machine.notes:
            if note.startswith(NOT_SAVED):
                err.print(note_text(note))

    def limited(machine: "HardwareProfile") -> "HardwareProfile":
        if reserve is not None:
            machine = with_reserve(machine, parse_bytes(reserve))
        if cap_memory is not None:
            machine = with_cap(machine, parse_bytes(cap_memory))
        if max_memory is not None:
            machine = with_budget(machine, parse_bytes(max_memory), by_user=True)
        return machine

    machine = limited(machine)
    several = hardware is None and machine.device.kind == "cuda"
    for index in range(1, min(num_devices, machine.device.count) if several else 1):
        machine = with_budget(machine, limited(probe(index=index)).device.budget_bytes)
    return machine


def _shared(name: str) -> "HardwareProfile | None":
    """The machine of the record in the user's store whose name begins so; None when `name` is no record's."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", name):
        return None
    from autotune.sharing import own_store, profile_of_record

    return profile_of_record(own_store().find(name)[1])
