"""The facts of a machine, from whatever its sources answer. No effects but the questions asked."""

import platform
from collections.abc import Mapping
from typing import Literal

from autotune.errors import AutotuneError, InvalidInput
from autotune.hardware.memory import budget, memory_kind
from autotune.hardware.reader import Nonsense, Reader
from autotune.schema import Device, Host, Link, Versions

PACKAGES: Mapping[str, str] = {
    "torch": "torch",
    "triton": "triton",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "peft": "peft",
    "accelerate": "accelerate",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "fastsafetensors": "fastsafetensors",
    "xformers": "xformers",
    "flash_attn": "flash-attn",
    "kernels": "kernels",
    "sageattention": "sageattention",
}
"""Field of `Versions` to name of the distribution."""

LINK_PATHS = ("nvlink", "same board", "pcie switch", "pcie switches", "host bridge", "same socket", "cpu sockets")


def read_host(reader: Reader) -> Host:
    """The computer around the device.

    Raises:
        AutotuneError: the operating system does not say how much memory there is; nothing could be planned.
    """
    memory = reader.integer("host.memory_bytes", "os:memory_bytes")
    available = reader.integer("host.available_memory_bytes", "os:available_bytes", least=0)
    if memory is None or available is None:
        reason = reader.provenance[-1 if available is None else -2].absent_because
        raise AutotuneError(f"the host's memory is unknown ({reason})", hint="check /proc/meminfo and psutil")
    limit = reader.quiet("os:container_free_bytes")
    if isinstance(limit, int) and 0 <= limit < available:
        available = limit
    return Host(
        cpu=reader.text("host.cpu", "os:cpu") or "unknown processor",
        physical_cores=reader.integer("host.physical_cores", "os:physical_cores", most=4096),
        logical_cores=reader.integer("host.logical_cores", "os:logical_cores", most=8192) or 1,
        memory_bytes=memory,
        available_memory_bytes=min(available, memory),
        swap_bytes=reader.integer("host.swap_bytes", "os:swap_bytes", least=0),
        system=reader.text("host.system", "os:system") or "unknown",
        memory_model=_memory_model(reader),
        container=reader.text("host.container", "os:container"),
        compiler=reader.text("host.compiler", "os:compiler"),
        gpu_direct_storage=reader.flag("host.gpu_direct_storage", "os:gpu_direct_storage"),
    )


def _memory_model(reader: Reader) -> Literal["linux", "wsl", "windows", "macos"]:
    system = str(reader.quiet("os:system")).lower()
    if reader.quiet("os:wsl"):
        return "wsl"
    return "windows" if system.startswith("windows") else "macos" if system.startswith("darwin") else "linux"


def read_versions(reader: Reader) -> Versions:
    """Versions of what decides how a step runs."""
    packages = {field: reader.text(f"versions.{field}", f"packages:{package}") for field, package in PACKAGES.items()}
    return Versions(
        python=reader.text("versions.python", "os:python") or platform.python_version(),
        cuda_runtime=reader.text("versions.cuda_runtime", "torch:cuda", "packages:torch_cuda"),
        cuda_driver=reader.text("versions.cuda_driver", "nvml:cuda_driver", "driver:cuda_driver"),
        driver=reader.text("versions.driver", "nvml:driver"),
        cudnn=reader.text("versions.cudnn", "torch:cudnn"),
        **packages,
    )


def read_device(reader: Reader, host: Host) -> Device:
    """The device that torch would train on: CUDA before MPS before the processor.

    Raises:
        InvalidInput: there is no device with the reader's index, or AUTOTUNE_MEMORY_KIND is no kind.
        AutotuneError: a CUDA device whose memory nobody knows.
    """
    kind = reader.quiet("torch:kind")
    kind = kind if kind in ("cuda", "mps") else "cpu"
    count = (reader.integer("device.count", "torch:count", most=1024) or 1) if kind == "cuda" else 1
    if reader.index >= count:
        raise InvalidInput(
            f"there is no {kind} device {reader.index}: {count} visible",
            hint="indices start at 0; see `autotune probe`",
        )
    if kind == "cuda":
        return _cuda_device(reader, count)
    return _mps_device(reader, host) if kind == "mps" else _cpu_device(host)


def _cuda_device(reader: Reader, count: int) -> Device:
    shares = reader.flag("device.integrated", "driver:integrated", "torch:integrated")
    pages = reader.flag("device.host_page_tables", "driver:host_page_tables")
    override = reader.quiet("environment:AUTOTUNE_MEMORY_KIND")
    kind, why = memory_kind(shares, pages, override if isinstance(override, str) else None)
    # NVML before torch: it opens no context, so free memory is what it was before us. Where memory is shared, the
    # host's counts, and not a container's part of it: a limit there does not contain CUDA's allocations.
    questions = ("os:available_bytes",) if kind in ("integrated", "host") else ("nvml:free_bytes", "torch:free_bytes")
    free = reader.integer("device.free_memory_bytes", *questions, least=0)
    total = reader.integer("device.total_memory_bytes", "torch:total_bytes", "nvml:total_bytes")
    display = reader.flag("device.drives_display", "nvml:display_active")
    if total is not None and free is not None:
        free = min(free, total)
    budget_bytes, budget_reason = budget(kind, total, free, display)
    return Device(
        kind="cuda",
        index=reader.index,
        count=count,
        name=reader.text("device.name", "torch:name", "nvml:name") or "unknown GPU",
        compute_capability=reader.fact(
            "device.compute_capability", ("torch:capability", "nvml:capability"), _capability
        ),
        sm_count=reader.integer("device.sm_count", "torch:sm_count", most=4096),
        l2_bytes=reader.integer("device.l2_bytes", "torch:l2_bytes", most=2**34),
        memory_kind=kind,
        memory_kind_reason=why,
        total_memory_bytes=total,
        free_memory_bytes=free,
        budget_bytes=budget_bytes,
        budget_reason=budget_reason,
        pcie_generation=reader.integer("device.pcie_generation", "nvml:pcie_generation", most=16),
        pcie_width=reader.integer("device.pcie_width", "nvml:pcie_width", most=64),
        pcie_max_width=reader.integer("device.pcie_max_width", "nvml:pcie_max_width", most=64),
        power_limit_watts=reader.number("device.power_limit_watts", "nvml:power_limit_watts", most=1e5),
        default_power_limit_watts=reader.number(
            "device.default_power_limit_watts", "nvml:default_power_limit_watts", most=1e5
        ),
        mig=reader.flag("device.mig", "nvml:mig"),
        drives_display=display,
        other_process_bytes=reader.integer("device.other_process_bytes", "nvml:other_process_bytes", least=0),
        links=reader.fact("device.links", ("nvml:links",), _links) or (),
    )


def _mps_device(reader: Reader, host: Host) -> Device:
    total = reader.integer("device.total_memory_bytes", "torch:recommended_bytes")
    budget_bytes, why = budget("integrated", total, host.available_memory_bytes, None)
    return Device(
        kind="mps",
        index=0,
        name=reader.text("device.name", "os:cpu") or "Apple GPU",
        memory_kind="integrated",
        memory_kind_reason="Apple GPUs share the host's memory",
        total_memory_bytes=total,
        free_memory_bytes=host.available_memory_bytes,
        budget_bytes=budget_bytes,
        budget_reason=why,
    )


def _cpu_device(host: Host) -> Device:
    budget_bytes, why = budget("host", host.memory_bytes, host.available_memory_bytes, None)
    return Device(
        kind="cpu",
        index=0,
        name=host.cpu,
        memory_kind="host",
        memory_kind_reason="the processor trains in the host's memory",
        total_memory_bytes=host.memory_bytes,
        free_memory_bytes=host.available_memory_bytes,
        budget_bytes=budget_bytes,
        budget_reason=why,
    )


def _capability(answer: object) -> tuple[int, int]:
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        raise Nonsense
    major, minor = answer
    if not (isinstance(major, int) and isinstance(minor, int) and 1 <= major < 100 and 0 <= minor < 10):
        raise Nonsense
    return int(major), int(minor)


def _links(answer: object) -> tuple[Link, ...]:
    if not isinstance(answer, list | tuple):
        raise Nonsense
    links = []
    for entry in answer:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise Nonsense
        peer, path = entry
        if isinstance(peer, bool) or not isinstance(peer, int) or peer < 0 or path not in LINK_PATHS:
            raise Nonsense
        links.append(Link(peer_index=peer, path=path))
    return tuple(links)
