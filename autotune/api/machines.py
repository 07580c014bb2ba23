"""What there is to train: the published models; and to train on: this machine and the catalog of
GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.events import Notice, OnEvent, StatusChanged, ignore_event
from autotune.machine.capabilities import NO_BF16, limit_device
from autotune.machine.catalog import (
    CatalogGpu,
    gpu_named,
    load_catalog,
    with_assumed_packages,
    with_host_memory,
)
from autotune.machine.probe import NOT_SAVED, cached_profile, hardware_named, may_have_gpu
from autotune.machine.probe import probe as read_machine
from autotune.models.registry import find_published
from autotune.models.single_file import open_single_file, recognize
from autotune.plan.amounts import memory_bytes
from autotune.plan.hardware import HardwareProfile

if TYPE_CHECKING:
    from autotune.search.comparison import ModelSummary


def list_gpus() -> tuple[CatalogGpu, ...]:
    """The GPUs that can be planned for without owning one, by compute capability.

    Example:
        >>> [gpu.id for gpu in autotune.list_gpus()]
    """
    return load_catalog()


def list_models(
    hardware: str | None = None, *, file: str | Path | None = None
) -> tuple[ModelSummary, ...]:
    """Every published model that autotune knows by name, or those whose DiT or UNet a single file
    may be.

    Args:
        hardware: a GPU of the catalog, to tell what it is predicted to do with each; `4090` and the
            like.
        file: a file of ComfyUI, Kohya or Civitai. Models of one architecture differ in nothing that
            is in it; the one that its name fits best, for which it is taken, comes first.

    Raises:
        InvalidInput: the catalog has no such GPU, or the file holds no known model; the message
            says what it is.

    Example:
        >>> {model.name: model.num_parameters for model in autotune.list_models()}
        >>> [model.name for model in autotune.list_models(file="flux1-dev-fp8.safetensors")]
    """
    from autotune.search.comparison import summarize_models

    summaries = summarize_models(gpu_named(hardware).id if hardware else None)
    if file is None:
        return summaries
    by_id = {summary.hub_id: summary for summary in summaries}
    return tuple(by_id[model.hub_id] for _, model in recognize(open_single_file(Path(file))))


def probe(
    *, quick: bool = False, device: int | None = None, on_event: OnEvent = ignore_event
) -> HardwareProfile:
    """Find out what this machine can do, and keep the measured rates for later plans.

    Args:
        quick: read facts only; measure nothing and keep nothing.
        device: index of the GPU, if there are several; by default the one with the most memory, on
            which plans train.
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


def require_gpu(model: str) -> None:
    """Tell at once if `model` is a published one that needs a GPU and this machine certainly has
    none.

    Loads no library; `plan` finds out as well, but later.

    Raises:
        NoGpu: with what the model would take on the GPUs of the catalog.

    Example:
        >>> autotune.require_gpu("qwen-image")
    """
    from autotune.search.comparison import NoGpu

    found = find_published(model)
    if found is not None and not Path(model).is_dir() and not may_have_gpu():
        raise NoGpu.build(*found)


def hardware_for(
    hardware: str | HardwareProfile | None,
    *,
    host_memory: int | str | None = None,
    assume: Collection[str] = (),
    on_event: OnEvent = ignore_event,
    on_facts: Callable[[HardwareProfile], None] = lambda facts: None,
) -> HardwareProfile:
    """The profile to plan with: of this machine, or the one that is named.

    Args:
        hardware: None for this machine; else a profile, a catalog name or enough of one (`4090`), a
            saved probe's file.
        host_memory: of the host that a card of the catalog is taken to be in; 64 GiB by default.
        assume: packages of attention backends that a card of the catalog is taken to have.
        on_event: listener to progress.
        on_facts: called with what is read of this machine before anything is measured.

    Raises:
        InvalidInput: there is no such hardware.
    """
    size = None if host_memory is None else memory_bytes(host_memory)
    if hardware is None:
        on_event(StatusChanged(text="reading the machine"))
        profile = cached_profile(on_progress=_status_to(on_event), on_facts=on_facts)
    else:
        profile = _named(hardware, on_event)
    if size is not None:
        profile = with_host_memory(profile, size)
    if assume:
        profile = with_assumed_packages(profile, assume)
    for note in profile.notes:
        if note.startswith((NOT_SAVED, NO_BF16)):
            on_event(Notice(text=note))
    return profile


def limit_memory(
    profile: HardwareProfile,
    *,
    num_devices: int = 1,
    max_memory: int | str | None = None,
    reserve_memory: int | str | None = None,
    cap_memory: int | str | None = None,
) -> HardwareProfile:
    """The profile with what a run may use of each of the devices that train together.

    Args:
        profile: of the machine, with one of its devices.
        num_devices: GPUs of this machine that train together; the one with the least memory
            decides.
        max_memory: the most that a run may use, its libraries included.
        reserve_memory: memory to leave to other programs.
        cap_memory: rehearse a device that has only so much memory.

    Raises:
        InvalidInput: an amount of memory cannot be read.
    """
    amounts = {"max_bytes": max_memory, "reserve_bytes": reserve_memory, "cap_bytes": cap_memory}
    limits = {name: memory_bytes(amount) for name, amount in amounts.items() if amount is not None}
    count = min(num_devices, profile.device.count) if profile.device.kind == "cuda" else 1
    own = profile.device
    others = [index for index in range(count) if index != own.index] if count > 1 else []
    devices = [own, *(read_machine(index=index).device for index in others)]
    limited = (limit_device(device, **limits) for device in devices)
    smallest = min(limited, key=lambda device: device.budget_bytes)
    budget = {name: value for name, value in smallest if name.startswith("budget_")}
    return profile.changed(device=own.changed(**budget))


def _named(hardware: str | HardwareProfile, on_event: OnEvent) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    profile = hardware_named(hardware)
    if (
        profile.origin == "catalog"
        and profile.datasheet
        and profile.datasheet.id != hardware.lower()
    ):
        on_event(
            Notice(text=f"planning for {profile.datasheet.id}")
        )  # a part of the name was enough
    return profile


def _status_to(on_event: OnEvent) -> Callable[[str], None]:
    return lambda text: on_event(StatusChanged(text=text))
