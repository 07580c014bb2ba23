"""The real machine behind `System`: torch, the operating system, installed packages, environment variables.

NVML and the driver API are in `nvidia.py`. Every failure becomes `Unavailable` with its reason: a machine may lack
any of these, and none may break the probe. `torch=False` keeps torch unimported: the doctor works that way.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from autotune.hardware.nvidia import DriverSource, NvmlSource
from autotune.hardware.system import Unavailable
from autotune.weights import has_gds

Answer = Callable[[int], object]


class RealSystem:
    """Asks this machine."""

    def __init__(self, *, torch: bool = True) -> None:
        driver = DriverSource()
        self._sources: dict[str, Mapping[str, Answer]] = {
            "os": OS_QUESTIONS,
            # The doctor looks at every GPU in NVML's order, also at those hidden from CUDA.
            "nvml": NvmlSource(driver.uuid if torch else None).questions,
            "driver": driver.questions,
            "torch": TorchSource().questions if torch else {},
        }

    def ask(self, source: str, question: str, index: int = 0) -> object:
        """The raw answer.

        Raises:
            Unavailable: the source is missing, failed, or does not support the question.
        """
        try:
            if source == "packages":
                return _package(question)
            if source == "environment":
                return os.environ[question]
            return self._sources[source][question](index)
        except Unavailable:
            raise
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("not installed") from None
        except KeyError:
            raise Unavailable("not reported") from None
        except Exception as error:  # whatever a driver or a library throws means the same here
            raise Unavailable(f"{type(error).__name__}: {error}".split("\n")[0][:200]) from error


class TorchSource:
    """The CUDA runtime (or MPS) as torch sees it; imports torch at the first question."""

    def __init__(self) -> None:
        self.questions: Mapping[str, Answer] = {
            "kind": lambda _: self._kind(),
            "count": lambda _: self._cuda().device_count(),
            "cuda": lambda _: _known(_torch().version.cuda, "this torch is built without CUDA"),
            "cudnn": lambda _: _cudnn_text(_known(_torch().backends.cudnn.version(), "no cuDNN")),
            "recommended_bytes": lambda _: _torch().mps.recommended_max_memory(),
            "name": lambda index: self._properties(index).name,
            "capability": lambda index: (self._properties(index).major, self._properties(index).minor),
            "sm_count": lambda index: self._properties(index).multi_processor_count,
            "l2_bytes": lambda index: self._properties(index).L2_cache_size,
            "total_bytes": lambda index: self._properties(index).total_memory,
            "integrated": lambda index: int(self._properties(index).is_integrated),
            "free_bytes": lambda index: self._cuda().mem_get_info(index)[0],
        }

    def _kind(self) -> str:
        torch = _torch()
        if torch.version.hip is not None:
            return "rocm"
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"

    def _cuda(self) -> Any:
        if self._kind() != "cuda":
            raise Unavailable("torch sees no CUDA device")
        return _torch().cuda

    def _properties(self, index: int) -> Any:
        return self._cuda().get_device_properties(index)


def _torch() -> Any:
    import torch

    return torch


def _known(value: object, otherwise: str) -> object:
    if value is None:
        raise Unavailable(otherwise)
    return value


def _cudnn_text(version: object) -> str:
    """91002 is 9.10.2, 8902 is 8.9.2: the base changed from 1000 to 10000 with cuDNN 9."""
    number = int(str(version))
    base = 10_000 if number >= 90_000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _package(name: str) -> str:
    """Version of a distribution. `torch_cuda` and `torch_hip` say how torch was built without importing it,
    `torchvision_needs` which torch an installed torchvision was built for."""
    if name == "torchvision_needs":
        needs = importlib.metadata.requires("torchvision") or []
        return str(_known(next((need for need in needs if need.startswith("torch==")), None), "any torch"))
    if name in ("torch_cuda", "torch_hip"):
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise Unavailable("torch is not installed")
        text = (Path(spec.origin).parent / "version.py").read_text()
        found = re.search(rf"^{name.removeprefix('torch_')}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        return str(_known(found and found.group(1), "this torch is built without it"))
    return importlib.metadata.version(name)


# --- operating system --------------------------------------------------------------------------------------------


CPUINFO = Path("/proc/cpuinfo")
BRAND = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
"""What tells an Apple chip from another: macOS calls the processor of each `arm`."""


def _cpu(_: int) -> str:
    """The processor's name; on Arm servers, whose kernel knows none, the numbers of maker and core."""
    if platform.system() == "Darwin":
        return subprocess.run(BRAND, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    text = _content(CPUINFO)
    if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE):
        return found.group(1)
    name = platform.processor() or platform.machine()
    if found := re.search(r"^CPU implementer\s*:\s*(\w+)\n(?:.+\n)*?CPU part\s*:\s*(\w+)", text, re.MULTILINE):
        name = f"{name} {found.group(1)}/{found.group(2)}"
    return str(_known(name or None, "no name"))


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""From here on a limit of cgroup v1 is none: it writes the largest page count there is."""


def _limits(controller: str, *files: str) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """(control group, numbers) of the files in this process's group and all around it that hold numbers alone.

    A container sees its own group as the root; a job of Slurm or a service of systemd is a group further down. Under
    cgroup v1 each controller has a hierarchy of its own, and a container is told where it lies in the host's.
    """
    lines = _content(OWN_CGROUP).splitlines() or ["0::/"]
    for _, names, own in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        group = root / own.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root) and (found := tuple(n for file in files for n in _numbers(place / file))):
                yield place, found


def _numbers(file: Path) -> tuple[int, ...]:
    """What a file of numbers holds; nothing where it cannot be read, or says `max`."""
    try:
        return tuple(map(int, _content(file).split()))
    except ValueError:
        return ()


def _content(file: Path) -> str:
    """Text of a file of the kernel's, empty where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _logical_cores(_: int) -> int:
    """Cores that this process may run on, quotas of its control groups included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = (*_limits("cpu", "cpu.max"), *_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    quotas = (numbers[0] // numbers[1] for _, numbers in found if len(numbers) == 2 and min(numbers) > 0)
    return max(1, min((allowed, *quotas)))


def memory_limits() -> list[tuple[int, int]]:
    """(most, what is left of it) of each group that limits memory; page cache inside it can be given back."""
    limits = []
    for file, taken, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group, (most, *_) in _limits("memory", file):
            inactive = re.search(rf"^{idle} (\d+)", _content(group / "memory.stat"), re.MULTILINE)
            left = most - sum(_numbers(group / taken)) + (int(inactive.group(1)) if inactive else 0)
            if most < UNLIMITED_BYTES:
                limits.append((most, max(0, left)))
    return limits


def memory_bytes() -> int:
    """Of the machine, or of the container or job within it."""
    return min((psutil.virtual_memory().total, *(most for most, _ in memory_limits())))


def _container_free_bytes(_: int) -> int:
    """What the memory limits of a container or a job leave."""
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
    raise Unavailable("none seen")


def _wsl(_: int) -> bool:
    return "microsoft" in platform.release().lower()


def _compiler(_: int) -> str:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return str(_known(next(filter(None, (shutil.which(name) for name in names if name)), None), "none on PATH"))


def _disk_free_bytes(_: int) -> int:
    """Free where models are kept: the hub's cache, or the nearest folder above it that exists."""
    from huggingface_hub.constants import HF_HUB_CACHE  # by HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME; imports nothing

    folder = Path(HF_HUB_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _nvidia_cards(_: int) -> int:
    """NVIDIA display controllers (PCI vendor 0x10de, class 0x03....) on the bus, with or without a driver."""
    cards = 0
    for device in Path("/sys/bus/pci/devices").iterdir():
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        cards += vendor == "0x10de" and kind.startswith("0x03")
    return cards


OS_QUESTIONS: Mapping[str, Answer] = {
    "cpu": _cpu,
    "physical_cores": lambda _: psutil.cpu_count(logical=False),
    "logical_cores": _logical_cores,
    "memory_bytes": lambda _: memory_bytes(),
    "available_bytes": lambda _: psutil.virtual_memory().available,
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
