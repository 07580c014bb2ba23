"""The patient of the doctor: what can be known of a machine without torch and without a CUDA context."""

from dataclasses import dataclass

from autotune.hardware.facts import read_host, read_versions
from autotune.hardware.reader import Reader
from autotune.hardware.system import System
from autotune.schema import Host, Versions


@dataclass(frozen=True)
class Gpu:
    """What can be known of a GPU without a CUDA context."""

    index: int
    name: str
    capability: tuple[int, int] | None
    total_bytes: int | None
    power_limit_watts: float | None
    default_power_limit_watts: float | None
    pcie_width: int | None
    pcie_max_width: int | None
    drives_display: bool | None
    other_process_bytes: int | None
    integrated: bool | None


@dataclass(frozen=True)
class Patient:
    """Everything the checks look at."""

    host: Host
    versions: Versions
    gpus: tuple[Gpu, ...]
    rocm: str | None
    """HIP version that torch was built with."""
    visible_devices: str | None
    attention: str | None
    """Backend chosen in the environment (DIFFUSERS_ATTN_BACKEND)."""
    disk_free_bytes: int | None
    disk_needed_bytes: int
    torchvision_needs: str | None
    """The torch that an installed torchvision was built for, e.g. `torch==2.12.0`."""
    nvidia_cards: int | None
    """NVIDIA cards on the bus, with or without a driver."""
    nvml_absent: str | None
    """Why NVML gives no answers."""


def examine(system: System, disk_needed_bytes: int) -> Patient:
    """Read what the checks need; asks everything but torch.

    Raises:
        AutotuneError: the operating system does not say how much memory there is.
    """
    reader = Reader(system)
    count = reader.integer("gpus", "nvml:count", "driver:count", least=0, most=64) or 0
    nvml = next(p for p in reader.provenance if p.fact == "gpus")
    visible = reader.quiet("environment:CUDA_VISIBLE_DEVICES")
    return Patient(
        host=read_host(reader),
        versions=read_versions(reader),
        gpus=tuple(_gpu(Reader(system, index)) for index in range(count)),
        rocm=reader.text("torch_hip", "packages:torch_hip"),
        visible_devices=visible if isinstance(visible, str) else None,
        attention=reader.text("attention", "environment:DIFFUSERS_ATTN_BACKEND"),
        disk_free_bytes=reader.integer("disk", "os:disk_free_bytes", least=0),
        torchvision_needs=reader.text("torchvision", "packages:torchvision_needs"),
        nvidia_cards=reader.integer("cards", "os:nvidia_cards", least=0, most=1024),
        disk_needed_bytes=disk_needed_bytes,
        nvml_absent=None if nvml.source == "NVML" else "NVML gives no answers: " + (nvml.absent_because or "missing"),
    )


def _gpu(reader: Reader) -> Gpu:
    capability = reader.quiet("nvml:capability")
    known = isinstance(capability, list | tuple) and len(capability) == 2 and all(type(n) is int for n in capability)
    return Gpu(
        index=reader.index,
        name=reader.text("name", "nvml:name") or "GPU",
        capability=(capability[0], capability[1]) if known else None,  # type: ignore[index]
        total_bytes=reader.integer("total", "nvml:total_bytes"),
        power_limit_watts=reader.number("power", "nvml:power_limit_watts"),
        default_power_limit_watts=reader.number("power", "nvml:default_power_limit_watts"),
        pcie_width=reader.integer("width", "nvml:pcie_width", most=64),
        pcie_max_width=reader.integer("width", "nvml:pcie_max_width", most=64),
        drives_display=reader.flag("display", "nvml:display_active"),
        other_process_bytes=reader.integer("others", "nvml:other_process_bytes", least=0),
        integrated=reader.flag("integrated", "driver:integrated"),
    )
