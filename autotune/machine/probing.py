"""The probe: reads and measures everything autotune knows about a machine, in under half a
minute."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from autotune.machine.capabilities import CUDA_13, capabilities_of, without_bf16
from autotune.machine.catalog import find_gpu
from autotune.machine.facts import read_device, read_host, read_versions
from autotune.machine.reader import Reader
from autotune.machine.sources import RealSystem
from autotune.machine.system import System, Unavailable
from autotune.plan.hardware import Device, HardwareProfile, OtherGpu, Rate, Versions
from autotune.system.process import silence_libraries

Progress = Callable[[str], None]
RATE_NOTES = ("not measured", "measuring ended", "noisy")
"""How notes about the rates begin; they are saved and reused with the rates."""
MEASURE = (sys.executable, "-m", "autotune.machine.measure")


def probe(*, index: int | None = None, on_progress: Progress | None = None) -> HardwareProfile:
    """Facts about device `index` of this machine, by default the GPU with the most memory;
    `measure_rates` adds rates. Imports torch.

    Raises:
        InvalidInput: there is no such device, or AUTOTUNE_MEMORY_KIND is no kind of memory.
        AutotuneError: no source reports how much memory the host or the device has.
    """
    silence_libraries()
    if on_progress:
        on_progress("reading facts")
    return read_profile(RealSystem(), index)


def read_profile(system: System, index: int | None = None) -> HardwareProfile:
    """Facts, budget and capabilities from what `system` reports; no rates. Arguments and errors
    as of `probe`."""
    if index is None:
        first = read_profile(system, 0)
        gpus: tuple[Device | OtherGpu, ...] = (first.device, *first.device.others)
        # Rounded, since equal cards differ by what their system reserves; of equal ones it is the
        # first.
        largest = max(gpus, key=lambda gpu: round((gpu.total_memory_bytes or 0) / 2**30))
        return first if largest.index == 0 else read_profile(system, largest.index)
    reader = Reader(system, index)
    host = read_host(reader)
    versions = read_versions(reader)
    device = read_device(reader, host)
    known = find_gpu(device.name, device.total_memory_bytes) if device.kind == "cuda" else None
    return HardwareProfile(
        device=device,
        host=host,
        versions=versions,
        capabilities=capabilities_of(device, host, versions),
        datasheet=known.datasheet if known else None,
        notes=_notes(reader, device, versions),
        provenance=tuple(reader.provenance),
    )


def may_have_gpu() -> bool:
    """False if there certainly is no GPU to train on: Linux without a working CUDA driver. Loads
    no torch."""
    if sys.platform != "linux":
        return True
    try:
        return bool(RealSystem().query("driver", "count"))
    except Unavailable:
        return False


def _notes(reader: Reader, device: Device, versions: Versions) -> tuple[str, ...]:
    """What a reader of the profile should know."""
    notes = []
    if reader.raw("torch:kind") == "rocm":
        notes.append(
            "this torch is a ROCm build: AMD GPUs are not supported, the CPU is profiled instead"
        )
    elif reader.raw("torch:kind") == "cpu" and reader.raw("nvml:count"):
        notes.append("there is an NVIDIA GPU, but torch does not use it: see `autotune doctor`")
    override = reader.raw("environment:AUTOTUNE_MEMORY_KIND")
    if override and device.kind == "cuda":
        notes.append(f"memory kind overridden by AUTOTUNE_MEMORY_KIND={override}")
    if (versions.cuda_runtime or "").startswith("12.") and (
        device.compute_capability or CUDA_13
    ) >= CUDA_13:
        notes.append("CUDA 12 works and is deprecated: PyTorch's newest builds are for CUDA 13")
    return (*notes, *without_bf16(device))


def measure_rates(
    profile: HardwareProfile,
    on_progress: Progress,
    command: tuple[str, ...] = MEASURE,
    limit_seconds: float = 120.0,
) -> HardwareProfile:
    """The profile with rates measured now. What cannot be measured is left out, with a note.

    A child process measures, so that a kernel that crashes or hangs costs its own rate only, and
    this process never holds a CUDA context on a device whose memory is about to be planned.
    """
    rates, notes, noisy, last = [], list(profile.notes), False, "the start"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as child:
        timer = threading.Timer(limit_seconds, child.kill)
        timer.start()
        try:
            for kind, value in _reports(child, profile):
                if kind == "rate":
                    rates.append(Rate.model_validate_json(value))
                elif kind == "note":
                    notes.append(value)
                elif kind == "noisy":
                    noisy = True
                    notes.append(f"noisy: {value}")
                else:
                    last = value
                    on_progress(f"measuring {value}")
        finally:
            timer.cancel()
            child.kill()
    if last != "done":
        notes.append(
            f"measuring ended early, in {last}: the process died or took over {limit_seconds:g} s"
        )
    return profile.changed(rates=tuple(rates), notes=tuple(notes), noisy=noisy)


def _reports(child: "subprocess.Popen[str]", profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    """(kind, value) of every report; other lines come from libraries and are skipped."""
    if child.stdin is None or child.stdout is None:
        return
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(profile.model_dump_json())
        child.stdin.close()
    for line in child.stdout:
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if isinstance(report, dict) and len(report) == 1:
                yield next(iter(report.items()))


def with_budget(profile: HardwareProfile, max_bytes: int) -> HardwareProfile:
    """The profile of a machine whose device leaves at most `max_bytes` to a run."""
    if max_bytes >= profile.device.budget_bytes:
        return profile
    return profile.changed(
        device=profile.device.changed(budget_bytes=max_bytes, budget_reason="limited")
    )
