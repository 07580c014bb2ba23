"""The probe: everything autotune knows about a machine, read and measured in under half a minute."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from autotune.hardware.answers import RealSystem
from autotune.hardware.catalogue import matching
from autotune.hardware.facts import read_device, read_host, read_versions
from autotune.hardware.gates import gates_of
from autotune.hardware.memory import budget
from autotune.hardware.reader import Reader
from autotune.hardware.system import System
from autotune.quiet import silence_libraries
from autotune.schema import Conditions, Frozen, HardwareProfile, Rate, Versions

T = TypeVar("T", bound=Frozen)
Progress = Callable[[str], None]


def probe(*, quick: bool = False, index: int = 0, on_progress: Progress | None = None) -> HardwareProfile:
    """The profile of device `index` of this machine; `quick` skips the measured rates. Imports torch.

    Raises:
        InvalidInput: there is no such device, or AUTOTUNE_MEMORY_KIND is no kind of memory.
        AutotuneError: nobody says how much memory the host or the device has.
    """
    silence_libraries()
    tell = on_progress or (lambda _: None)
    tell("reading facts")
    system = RealSystem()
    profile = profile_of(system, index)
    return profile if quick else measured(profile, system, tell)


def profile_of(system: System, index: int = 0) -> HardwareProfile:
    """Facts, budget and gates from what `system` answers; no rates.

    Raises:
        InvalidInput: as `probe`.
        AutotuneError: as `probe`.
    """
    reader = Reader(system, index)
    host = read_host(reader)
    versions = read_versions(reader)
    device = read_device(reader, host)
    known = matching(device.name, device.total_memory_bytes) if device.kind == "cuda" else None
    return HardwareProfile(
        device=device,
        host=host,
        versions=versions,
        gates=gates_of(device, host, versions),
        datasheet=known.datasheet if known else None,
        notes=notes_of(reader, versions),
        provenance=tuple(reader.provenance),
    )


def notes_of(reader: Reader, versions: Versions) -> tuple[str, ...]:
    """What a reader of the profile should know, each said once."""
    notes = []
    if reader.quiet("torch:kind") == "rocm":
        notes.append("this torch is a ROCm build: AMD GPUs are not supported, the processor is profiled instead")
    override = reader.quiet("environment:AUTOTUNE_MEMORY_KIND")
    if override:
        notes.append(f"memory kind overridden by AUTOTUNE_MEMORY_KIND={override}")
    if (versions.cuda_runtime or "").startswith("12."):
        notes.append("CUDA 12 works and is deprecated: PyTorch's newest builds are for CUDA 13")
    return tuple(notes)


def measured(profile: HardwareProfile, system: System, tell: Progress) -> HardwareProfile:
    """The profile with rates measured now. What cannot be measured is left out, with a note."""
    from autotune.hardware.rates import Meter, is_noisy

    overhead = process_overhead(profile)
    meter = Meter(profile, lambda: conditions_of(profile, system))
    begin = time.perf_counter()
    rates, notes = [overhead] if overhead else [], list(profile.notes)
    for name, measure in meter.measurements():
        if time.perf_counter() - begin > meter.effort.total_seconds:
            notes.append(f"not measured for lack of time: {name}")
            continue
        tell(f"measuring {name}")
        try:
            rates.append(measure())
        except Exception as error:  # a kernel that fails here says so, and the rest is still worth having
            notes.append(f"not measured: {name}: {type(error).__name__}: {error}".split("\n")[0][:200])
    matmul = next((rate for rate in rates if rate.name.startswith("matmul.")), None)
    again = next(meter.measurements())[1]() if matmul else None
    noisy = is_noisy(tuple(rates), again)
    return with_rates(profile, tuple(rates), tuple(notes), noisy)


def with_rates(
    profile: HardwareProfile, rates: tuple[Rate, ...], notes: tuple[str, ...], noisy: bool
) -> HardwareProfile:
    """The profile with these rates."""
    return _changed(profile, {"rates": rates, "notes": notes, "noisy": noisy})


def with_reserve(profile: HardwareProfile, reserve_bytes: int) -> HardwareProfile:
    """The profile with a budget that leaves `reserve_bytes` untouched, in place of the usual reserve."""
    device = profile.device
    num_bytes, why = budget(
        device.memory_kind, device.total_memory_bytes, device.free_memory_bytes, device.drives_display, reserve_bytes
    )
    return _changed(profile, {"device": _changed(device, {"budget_bytes": num_bytes, "budget_reason": why})})


def _changed(whole: T, changes: dict[str, object]) -> T:
    """A copy with some fields changed, validated anew (`model_copy` would not)."""
    fields: dict[str, Any] = {name: getattr(whole, name) for name in type(whole).model_fields}
    return type(whole)(**(fields | changes))


def process_overhead(profile: HardwareProfile) -> Rate | None:
    """Bytes that a process costs before its first tensor: a CUDA context, or the libraries in the host's memory."""
    if profile.device.kind == "cuda":
        import torch

        index, before = profile.device.index, profile.device.free_memory_bytes
        if before is None or profile.device.memory_kind == "integrated":
            return None
        some = torch.ones(8, 8, device=f"cuda:{index}")
        some @ some
        torch.cuda.synchronize(index)
        num_bytes = before - torch.cuda.mem_get_info(index)[0] - torch.cuda.memory_reserved(index)
    else:
        num_bytes = psutil.Process().memory_info().rss
    return (
        Rate(name="process.overhead", value=num_bytes, unit="B", spread=0.0, num_samples=1) if num_bytes > 0 else None
    )


def conditions_of(profile: HardwareProfile, system: System) -> Conditions | None:
    """Clock, temperature and power of a GPU now; None on other devices."""
    if profile.device.kind != "cuda":
        return None
    reader = Reader(system, profile.device.index)
    return Conditions(
        clock_mhz=reader.integer("clock", "nvml:clock_mhz", most=10_000),
        temperature_celsius=reader.integer("temperature", "nvml:temperature_celsius", most=150),
        power_watts=reader.number("power", "nvml:power_watts", most=1e5),
    )
