"""What the doctor examines: the facts of a machine that can be read without torch and without a
CUDA context."""

from autotune.machine.facts import CUDA, MEMORY_SIGNALS, read_host, read_versions
from autotune.machine.reader import FREE, TEXT, Facts, Reader, integer
from autotune.machine.system import System
from autotune.plan.base import Frozen
from autotune.plan.hardware import Host, Versions


class Gpu(Frozen):
    """The facts of one GPU; fields as in `Device`."""

    index: int
    name: str = "GPU"
    compute_capability: tuple[int, int] | None = None
    total_memory_bytes: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    drives_display: bool | None = None
    other_process_bytes: int | None = None
    integrated: bool | None = None


GPU: Facts = {
    name: (kind, *(query for query in queries if not query.startswith("torch:")))
    for name, (kind, *queries) in {**CUDA, **MEMORY_SIGNALS}.items()
    if name in Gpu.model_fields
}
OTHER: Facts = {
    "rocm": (TEXT, "packages:torch_hip"),
    "attention": (TEXT, "environment:DIFFUSERS_ATTN_BACKEND"),
    "disk_free_bytes": (FREE, "os:disk_free_bytes"),
    "torchvision_needs": (TEXT, "packages:torchvision_needs"),
    "nvidia_cards": (integer(0, 1024), "os:nvidia_cards"),
}


class DoctorFacts(Frozen):
    """Everything that the checks examine."""

    host: Host
    versions: Versions
    gpus: tuple[Gpu, ...]
    rocm: str | None = None
    """HIP version that torch was built with."""
    visible_devices: str | None
    attention: str | None = None
    """Attention backend chosen in the environment (DIFFUSERS_ATTN_BACKEND)."""
    disk_free_bytes: int | None = None
    disk_needed_bytes: int
    torchvision_needs: str | None = None
    """The torch that an installed torchvision was built for, e.g. `torch==2.12.0`."""
    nvidia_cards: int | None = None
    """NVIDIA cards on the bus, with or without a driver."""
    nvml_absent: str | None
    """Why NVML is unavailable; None if it is available."""


def read_doctor_facts(system: System, disk_needed_bytes: int) -> DoctorFacts:
    """Read what the checks need, from every source but torch.

    Raises:
        AutotuneError: the operating system does not report how much memory there is.
    """
    reader = Reader(system)
    count = reader.fact("gpus", integer(0, 64), "nvml:count", "driver:count") or 0
    nvml = reader.provenance[-1]
    visible = reader.raw("environment:CUDA_VISIBLE_DEVICES")
    return DoctorFacts(
        host=read_host(reader),
        versions=read_versions(reader),
        gpus=tuple(
            Gpu(index=index, **Reader(system, index).facts("device", GPU)) for index in range(count)
        ),
        visible_devices=visible if isinstance(visible, str) else None,
        disk_needed_bytes=disk_needed_bytes,
        nvml_absent=None
        if nvml.source == "NVML"
        else "NVML is unavailable: " + (nvml.absent_because or "missing"),
        **reader.facts("machine", OTHER),
    )
