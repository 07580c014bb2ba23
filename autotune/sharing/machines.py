"""A shared record's machine as hardware to plan for: what it measured, on the sheet of its GPU."""

from autotune.errors import InvalidInput
from autotune.hardware import find_gpu, profile_of_gpu, with_budget
from autotune.schema import HardwareProfile
from autotune.sharing.plausibility import implausible
from autotune.sharing.record import Record


def profile_of_record(record: Record) -> HardwareProfile:
    """The catalog's profile of the record's GPU, with the rates and the budget that the record's machine had.

    Raises:
        InvalidInput: the record cannot be true, or the catalog does not know the device: most facts would be missing.
    """
    machine = record.machine
    if reasons := implausible(record):
        raise InvalidInput(f"the record cannot be true: {reasons[0]}", hint="`autotune profiles prune` deletes such")
    gpu = find_gpu(machine.device_name, machine.total_memory_bytes)
    if gpu is None:
        raise InvalidInput(
            f"the record's device, {machine.device_name}, is not in the catalog",
            hint="plan on that machine, or save its probe there and pass the file",
        )
    profile = with_budget(profile_of_gpu(gpu), machine.budget_bytes)
    note = f"rates measured on such a machine, from record {record.name[:12]}"
    return profile.changed(rates=machine.rates, notes=(*profile.notes, note), noisy=machine.noisy)
