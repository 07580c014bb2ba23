"""A shared record's machine as hardware to plan for: its measurements, on the datasheet of its
GPU.
"""

from autotune.errors import InvalidInput
from autotune.hardware import find_gpu, profile_of_gpu, with_budget
from autotune.schema import HardwareProfile
from autotune.sharing.plausibility import find_impossibilities
from autotune.sharing.record import Record


def hardware_from_record(name: str, record: Record) -> HardwareProfile:
    """The catalog's profile of the record's GPU, with the rates and the budget that the record's
    machine had.

    Raises:
        InvalidInput: the record cannot be true, or the catalog lacks the device: most facts would
            be missing.
    """
    machine = record.machine
    if reasons := find_impossibilities(record):
        raise InvalidInput(
            f"the record cannot be true: {reasons[0]}",
            hint="`autotune profiles prune` deletes such records",
        )
    gpu = find_gpu(machine.device_name, machine.total_memory_bytes)
    if gpu is None:
        raise InvalidInput(
            f"the record's device, {machine.device_name}, is not in the catalog",
            hint="plan on that machine, or save its probe there and pass the file",
        )
    profile = with_budget(profile_of_gpu(gpu), machine.budget_bytes)
    note = f"rates measured on such a machine, from record {name[:12]}"
    return profile.changed(rates=machine.rates, notes=(*profile.notes, note), noisy=machine.noisy)
