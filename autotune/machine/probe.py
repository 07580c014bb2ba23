"""The probe: reads, measures and saves what a machine can do."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.events import Notice, OnEvent, StatusChanged
from autotune.machine import capabilities, catalog
from autotune.machine.facts import Reader, read_device
from autotune.machine.sources import System, Unavailable
from autotune.plan.base import digest_of, log_event, memory_bytes
from autotune.plan.hardware import Device, HardwareProfile, OtherGpu, Rate, Versions
from autotune.plan.request import PlanRequest
from autotune.system import files, process

Progress = Callable[[str], None]
# How notes about the rates begin; they are saved and reused with the rates.
RATE_NOTES = ("not measured", "measuring ended", "noisy")
MEASURE = (*process.PYTHON, "-m", "autotune.machine.rates")


def probe(*, index: int | None = None, on_progress: Progress | None = None) -> HardwareProfile:
    """Read facts about device `index` of this machine, by default the GPU with the most memory.
    Raises InvalidInput if there is no such device, and AutotuneError if its memory is unknown."""
    if on_progress:
        on_progress("reading facts")
    return read_profile(System(), index)


def read_profile(system: System, index: int | None = None) -> HardwareProfile:
    """Read facts, budget and capabilities from what `system` reports, as `probe`."""
    if index is None:
        first = read_profile(system, 0)
        gpus: tuple[Device | OtherGpu, ...] = (first.device, *first.device.others)
        # Rounded, since equal cards differ by what their system reserves: the first of equal ones.
        largest = max(gpus, key=lambda gpu: round((gpu.total_memory_bytes or 0) / 2**30))
        return first if largest.index == 0 else read_profile(system, largest.index)
    reader = Reader(system, index)
    host = reader.read_host()
    versions = reader.read_versions()
    device = read_device(reader, host)
    is_cuda = device.kind == "cuda"
    known = catalog.find_gpu(device.name, device.total_memory_bytes) if is_cuda else None
    profile = HardwareProfile(
        device=device,
        host=host,
        versions=versions,
        datasheet=known.datasheet if known else None,
        notes=_notes(reader, device, versions),
    )
    return capabilities.with_capabilities(profile)


def may_have_gpu() -> bool:
    """Return False if there is no GPU to train on: Linux without a CUDA driver. Loads no torch."""
    if sys.platform != "linux":
        return True
    try:
        return bool(System().query("driver", "count"))
    except Unavailable:
        return False


def _notes(reader: Reader, device: Device, versions: Versions) -> tuple[str, ...]:
    notes = []
    kind, cuda = reader.raw("torch:kind"), versions.cuda_runtime or ""
    if kind == "rocm":
        notes.append("this torch is a ROCm build: AMD GPUs are not supported, only the CPU is used")
    elif kind == "cpu" and reader.raw("nvml:count"):
        notes.append("there is an NVIDIA GPU, but torch does not use it: see `autotune doctor`")
    override = reader.raw("environment:AUTOTUNE_MEMORY_KIND")
    if override and device.kind == "cuda":
        notes.append(f"memory kind overridden by AUTOTUNE_MEMORY_KIND={override}")
    own = device.compute_capability
    if device.kind == "cuda" and capabilities.lacks_code(versions, own):
        notes.append(f"this torch (CUDA {cuda}) has no code for the GPU: see `autotune doctor`")
    elif cuda.startswith("12.") and (own or capabilities.CUDA_13) >= capabilities.CUDA_13:
        notes.append("CUDA 12 works and is deprecated: PyTorch's newest builds are for CUDA 13")
    return (*notes, *capabilities.without_bf16(device))


def measure_rates(
    profile: HardwareProfile,
    on_progress: Progress,
    command: tuple[str, ...] = MEASURE,
    limit_seconds: float = 120.0,
) -> HardwareProfile:
    """Return the profile with rates measured now. What cannot be measured is left out, with a note.
    A child process measures, so that a kernel that crashes or hangs costs its own rate only, and
    this process never holds a CUDA context on a device whose memory is about to be planned."""
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
        died = f"the process died or took over {limit_seconds:g} s"
        notes.append(f"measuring ended early, in {last}: {died}")
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


MAX_PROFILE_BYTES = 4 << 20

# Share by which a GPU's power limit may change, as laptops' do, before rates are measured again.
POWER_TOLERANCE = 0.1
NOT_SAVED = "rates are not saved for the next command"  # so the note about that begins


def cached_profile(
    *,
    index: int | None = None,
    fresh: bool = False,
    on_progress: Progress | None = None,
    on_facts: Callable[[HardwareProfile], None] = lambda facts: None,
) -> HardwareProfile:
    """Return this machine's profile: facts as they are now, rates from the last probe if valid.

    Rates are measured again if `fresh`, if the saved file is absent, damaged or of another device,
    or if the match keys, the GPU's power limit or the number of cores that train have changed.
    `on_facts` gets the profile before any rate is measured: what it raises saves that time.
    """
    now = probe(index=index, on_progress=on_progress)
    on_facts(now)
    path = profile_path(now)
    saved = None
    with contextlib.suppress(InvalidInput):  # absent or damaged
        saved = None if fresh else load_profile(path)
    if saved is not None and has_valid_rates(saved, now):
        notes = (note for note in saved.notes if note.startswith(RATE_NOTES))
        return now.changed(rates=saved.rates, notes=(*now.notes, *notes), noisy=saved.noisy)
    profile = measure_rates(now, on_progress or (lambda _: None))
    try:
        save_profile(profile, path)
    except OSError as error:  # the rates are valid all the same
        why = f"the cache folder cannot be written ({error.strerror}); XDG_CACHE_HOME names another"
        return profile.changed(notes=(*profile.notes, f"{NOT_SAVED}: {why}"))
    return profile


def has_valid_rates(saved: HardwareProfile, now: HardwareProfile) -> bool:
    """Tell if the saved rates hold for the machine as it is now."""
    before, device = saved.device, now.device
    if not saved.rates or saved.match_keys != now.match_keys or before.name != device.name:
        return False
    if device.kind == "cpu":  # a container may have a part of the host's cores
        return saved.host.logical_cores == now.host.logical_cores
    if before.power_limit_watts is None or device.power_limit_watts is None:
        return True
    return abs(device.power_limit_watts / before.power_limit_watts - 1) <= POWER_TOLERANCE


def profile_path(profile: HardwareProfile) -> Path:
    """Return where the profile of this device is saved."""
    device = profile.device
    return files.cache_path("hardware", f"{device.kind}-{device.index}-{device.file_name}.json")


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the profile and its digest, atomically."""
    data = profile.model_dump(mode="json")
    content = {"digest": digest_of(data), "profile": data}
    files.write_text_atomic(path, json.dumps(content, indent=1) + "\n")


def load_profile(path: Path | str) -> HardwareProfile:
    """Load a profile of `save_profile` or `probe --json`, else raise InvalidInput."""
    hint = "write a new one with `autotune probe`"
    try:
        content = dict(json.loads(files.read_bounded(Path(path), MAX_PROFILE_BYTES)))
        printed = content.pop("schema_version", None) is not None  # which has no digest
        data = content if printed else content["profile"]
        if not printed and content["digest"] != digest_of(data):  # older ones have other fields
            what = f"{path} was damaged or edited: its digest does not match"
            raise InvalidInput(what, hint=hint)
        return HardwareProfile.model_validate_json(json.dumps(data))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{path} is damaged, or not a hardware profile that this autotune can read"
        raise InvalidInput(what, hint=hint) from error


def hardware_named(name_or_path: str) -> HardwareProfile:
    """Return the profile of a catalog GPU, by a part of its name, or in a saved probe's file."""
    names = {name.lower() for gpu in catalog.load_catalog() for name in (gpu.id, gpu.name)}
    if name_or_path.lower() not in names and Path(name_or_path).is_file():
        return load_profile(name_or_path)
    return catalog.profile_of_gpu(catalog.gpu_named(name_or_path))


def hardware_for(
    hardware: str | HardwareProfile | None,
    *,
    host_memory: int | str | None = None,
    assume: Collection[str] = (),
    on_event: OnEvent = log_event,
    on_facts: Callable[[HardwareProfile], None] = lambda facts: None,
) -> HardwareProfile:
    """Return the profile to plan with: of this machine, or the one that is named. `host_memory` and
    `assume` describe the host and the packages of a card of the catalog; `on_facts` gets what is
    read of this machine before anything is measured."""
    if isinstance(hardware, HardwareProfile):
        profile = hardware
    elif hardware is not None:
        profile = hardware_named(hardware)
    else:
        on_event(StatusChanged(text="reading the machine"))
        profile = cached_profile(on_progress=status_to(on_event), on_facts=on_facts)
    if host_memory is not None:
        profile = catalog.with_host_memory(profile, memory_bytes(host_memory))
    if isinstance(hardware, str) and profile.datasheet and profile.origin == "catalog":
        host = f" with {profile.host.memory_bytes / 2**30:g} GiB of system RAM"
        host = "" if profile.device.memory_kind == "integrated" else host
        on_event(Notice(text=f"planning for {profile.datasheet.id}{host}"))
    if assume:
        profile = catalog.with_assumed_packages(profile, assume)
    for note in profile.notes:
        if note.startswith((NOT_SAVED, capabilities.NO_BF16)):
            on_event(Notice(text=note))
    return profile


def with_earlier_packages(
    profile: HardwareProfile, assumed: Collection[str], on_event: OnEvent
) -> HardwareProfile:
    """Return a card of the catalog with those packages of a plan's card that it can run."""
    kept = []
    for name in assumed if profile.origin == "catalog" else ():
        try:
            catalog.with_assumed_packages(profile, (name,))
            kept.append(name)
        except InvalidInput as error:
            on_event(Notice(text=f"the plan assumed {name}: {error.message}"))
    return catalog.with_assumed_packages(profile, kept) if kept else profile


def limit_memory(profile: HardwareProfile, request: PlanRequest) -> HardwareProfile:
    """Return the profile with what a run may use: the least of the devices that train together."""
    own = profile.device
    devices = [own]
    if request.is_local and request.num_gpus > 1 and own.kind == "cuda":
        others = set(range(min(request.num_gpus, own.count))) - {own.index}
        devices += [probe(index=index).device for index in sorted(others)]
    limited = [capabilities.limit_device(device, *request.memory_limits) for device in devices]
    smallest = min(limited, key=lambda device: device.budget_bytes)
    budget = {name: value for name, value in smallest if name.startswith("budget_")}
    return profile.changed(device=own.changed(**budget))


def status_to(on_event: OnEvent) -> Callable[[str], None]:
    """Return a function that passes texts on as events."""
    return lambda text: on_event(StatusChanged(text=text))
