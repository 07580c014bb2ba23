"""The real machine behind `System`: torch, the operating system, installed packages, environment
variables.

NVML and the driver API are in `nvidia.py`. Every failure becomes `Unavailable` with its reason: a
machine may lack any of these, and none may break the probe. With `torch=False` torch is not
imported, as the doctor needs.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from huggingface_hub import constants

from autotune.machine.nvidia import DriverSource, NvmlSource, Query
from autotune.machine.system import Unavailable
from autotune.system.lazy import lazy_module
from autotune.weights.tensors import has_gds

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")  # only a probe of the device needs it; the doctor must not load it


class RealSystem:
    """This machine."""

    def __init__(self, *, torch: bool = True) -> None:
        driver = DriverSource()
        self._sources: dict[str, Mapping[str, Query]] = {
            "os": OS_QUERIES,
            # The doctor examines all GPUs, in NVML's order, including those hidden from CUDA.
            "nvml": NvmlSource(driver.uuid if torch else None).queries,
            "driver": driver.queries,
            "torch": TORCH_QUERIES if torch else {},
        }

    def query(self, source: str, name: str, index: int = 0) -> object:
        """The raw value. Raises Unavailable if the source is missing, failed, or does not
        support the query."""
        try:
            if source == "packages":
                return _package(name)
            if source == "environment":
                return os.environ[name]
            return self._sources[source][name](index)
        except Unavailable:
            raise
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("not installed") from None
        except KeyError:
            raise Unavailable("not reported") from None
        except Exception as error:  # whatever a driver or a library raises means the same
            raise Unavailable(f"{type(error).__name__}: {error}".split("\n")[0][:200]) from error


def _torch_kind() -> str:
    if torch.version.hip is not None:
        return "rocm"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _cuda() -> Any:
    if _torch_kind() != "cuda":
        raise Unavailable("torch sees no CUDA device")
    return torch.cuda


def _property(name: str) -> Query:
    return lambda index: getattr(_cuda().get_device_properties(index), name)


TORCH_QUERIES: Mapping[str, Query] = {
    "kind": lambda _: _torch_kind(),
    "count": lambda _: _cuda().device_count(),
    "cuda": lambda _: _require(torch.version.cuda, "this torch is built without CUDA"),
    "cudnn": lambda _: _require(cudnn_version(), "no cuDNN"),
    "recommended_bytes": lambda _: torch.mps.recommended_max_memory(),
    "name": _property("name"),
    "capability": lambda index: _cuda().get_device_capability(index),
    "sm_count": _property("multi_processor_count"),
    "l2_bytes": _property("L2_cache_size"),
    "total_bytes": _property("total_memory"),
    "integrated": _property("is_integrated"),
    "free_bytes": lambda index: _cuda().mem_get_info(index)[0],
}
"""The CUDA runtime (or MPS) as torch sees it; torch is imported at the first query."""


def _require(value: object, otherwise: str) -> object:
    if value is None:
        raise Unavailable(otherwise)
    return value


def cudnn_version() -> str | None:
    """The version of cuDNN that torch loads; None if there is none.

    torch says 91002 for 9.10.2 and 8902 for 8.9.2: the base changed from 1000 to 10000 with cuDNN
    9.
    """
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    base = 10_000 if number >= 90_000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _package(name: str) -> str:
    """Version of a distribution. `torch_cuda` and `torch_hip` tell how torch was built, without
    importing it; `torchvision_needs` is the torch that an installed torchvision was built for."""
    if name == "torchvision_needs":
        needs = importlib.metadata.requires("torchvision") or []
        return str(
            _require(
                next((need for need in needs if need.startswith("torch==")), None), "any torch"
            )
        )
    if name in ("torch_cuda", "torch_hip"):
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise Unavailable("torch is not installed")
        text = (Path(spec.origin).parent / "version.py").read_text()
        found = re.search(
            rf"^{name.removeprefix('torch_')}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE
        )
        return str(_require(found and found.group(1), "this torch is built without it"))
    return importlib.metadata.version(name)


CPUINFO = Path("/proc/cpuinfo")
BRAND = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
"""Prints the name of an Apple chip, which Python does not know: to it each is `arm`."""


def _cpu(_: int) -> str:
    """The CPU's name; on Arm servers, whose kernel knows none, the numbers of implementer and
    part."""
    if platform.system() == "Darwin":
        return subprocess.run(
            BRAND, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    text = _content(CPUINFO)
    if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE):
        return found.group(1)
    name = platform.processor() or platform.machine()
    if found := re.search(
        r"^CPU implementer\s*:\s*(\w+)\n(?:.+\n)*?CPU part\s*:\s*(\w+)", text, re.MULTILINE
    ):
        name = f"{name} {found.group(1)}/{found.group(2)}"
    return str(_require(name or None, "no name"))


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""From this size on, a limit of cgroup v1 means that there is none."""


def _limits(controller: str, *files: str) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """(control group, numbers in its `files`) of this process's group and each group above it that
    sets limits.

    A container sees its own group as the root; a Slurm job or a systemd service is a group further
    down. Under cgroup v1 each controller has its own hierarchy, and a container reads its path as
    the host sees it.
    """
    lines = _content(OWN_CGROUP).splitlines() or ["0::/"]
    for _, names, own in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        group = root / own.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root) and (
                found := tuple(n for file in files for n in _numbers(place / file))
            ):
                yield place, found


def _numbers(file: Path) -> tuple[int, ...]:
    """The numbers in a file; none if it cannot be read or holds `max`."""
    try:
        return tuple(map(int, _content(file).split()))
    except ValueError:
        return ()


def _content(file: Path) -> str:
    """Text of one of the kernel's files, empty if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _logical_cores(_: int) -> int:
    """Number of cores that this process may use, by its affinity and the quotas of its control
    groups."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    found = (*_limits("cpu", "cpu.max"), *_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    quotas = (
        numbers[0] // numbers[1] for _, numbers in found if len(numbers) == 2 and min(numbers) > 0
    )
    return max(1, min((allowed, *quotas)))


def memory_limits() -> list[tuple[int, int]]:
    """(limit, what is left of it) in bytes, for each group that limits memory; its page cache
    counts as left."""
    limits = []
    for file, used, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group, (limit, *_) in _limits("memory", file):
            inactive = re.search(rf"^{idle} (\d+)", _content(group / "memory.stat"), re.MULTILINE)
            left = limit - sum(_numbers(group / used)) + (int(inactive.group(1)) if inactive else 0)
            if limit < UNLIMITED_BYTES:
                limits.append((limit, max(0, left)))
    return limits


def memory_bytes() -> int:
    """Memory of the machine, or of the container or job within it."""
    return min((psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())))


def available_bytes() -> int:
    """What the host, and any container or job that this process runs in, can give without
    swapping."""
    limits = memory_limits() if _is_limited() else ()
    return min((host_available_bytes(), *(left for _, left in limits)))


@cache
def _is_limited() -> bool:
    """Whether a container or a job limits memory: reading the limits takes 0.3 ms, too long for
    every look."""
    return bool(memory_limits())


def host_available_bytes() -> int:
    """What the whole host can give without swapping (MemAvailable)."""
    return int(psutil.virtual_memory().available)


def _container_free_bytes(_: int) -> int:
    """What the memory limits of the container or job leave."""
    limits = memory_limits()
    if not limits:
        raise Unavailable("no limit")
    return min(left for _, left in limits)


def _container(_: int) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    for marker, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if Path(marker).exists():
            return name
    raise Unavailable("none detected")


def _wsl(_: int) -> bool:
    return "microsoft" in platform.release().lower()


def _compiler(_: int) -> str:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return str(
        _require(
            next(filter(None, (shutil.which(name) for name in names if name)), None), "none on PATH"
        )
    )


def _disk_free_bytes(_: int) -> int:
    """Free space for models: in the hub's cache, or the nearest folder above it that exists."""
    folder = Path(constants.HF_HUB_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _nvidia_cards(_: int) -> int:
    """NVIDIA display controllers (PCI vendor 0x10de, class 0x03....) on the bus, with or without
    a driver."""
    cards = 0
    for device in Path("/sys/bus/pci/devices").iterdir():
        vendor, kind = (
            (device / "vendor").read_text().strip(),
            (device / "class").read_text().strip(),
        )
        cards += vendor == "0x10de" and kind.startswith("0x03")
    return cards


OS_QUERIES: Mapping[str, Query] = {
    "cpu": _cpu,
    "physical_cores": lambda _: psutil.cpu_count(logical=False),
    "logical_cores": _logical_cores,
    "memory_bytes": lambda _: memory_bytes(),
    "available_bytes": lambda _: host_available_bytes(),
    "container_free_bytes": _container_free_bytes,
    "swap_bytes": lambda _: psutil.swap_memory().total,
    "system": lambda _: f"{platform.system()} {platform.release()}",
    "wsl": _wsl,
    "container": _container,
    "compiler": _compiler,
    "gpu_direct_storage": lambda _: has_gds(),
    "disk_free_bytes": _disk_free_bytes,
    "nvidia_cards": _nvidia_cards,
    "python": lambda _: platform.python_version(),
}
