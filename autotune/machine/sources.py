"""The one seam to the machine: a source answers a query with a raw value, or why there is none.

Sources: `torch` (the CUDA runtime or MPS as torch sees it), `nvml`, `driver` (CUDA driver API),
`os`, `packages` (installed versions), `environment` (variables).
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from autotune.system.lazy import torch
from autotune.system.process import usable_cores


class Unavailable(Exception):
    """A source has no value; the message is the reason, for people."""


Query = Callable[[int], object]  # reads one value of the device with that index

CU_ATTRIBUTE_INTEGRATED = 18
CU_ATTRIBUTE_HOST_PAGE_TABLES = 100  # pageableMemoryAccessUsesHostPageTables

# NVML's topology levels in words.
TOPOLOGY_PATHS = {
    0: "same board",
    10: "pcie switch",
    20: "pcie switches",
    30: "host bridge",
    40: "same socket",
    50: "cpu sockets",
}


class NvmlSource:
    """NVML. `uuid_of` maps CUDA's device index to a UUID; None means NVML's own order. NVML numbers
    devices in another order than CUDA, and ignores CUDA_VISIBLE_DEVICES."""

    def __init__(self, uuid_of: Callable[[int], str] | None) -> None:
        self._uuid_of, self._initialized = uuid_of, False
        self.queries: Mapping[str, Query] = {
            "driver": lambda _: _text(self._nvml().nvmlSystemGetDriverVersion()),
            "cuda_driver": lambda _: _dotted(self._nvml().nvmlSystemGetCudaDriverVersion_v2()),
            "count": lambda _: self._nvml().nvmlDeviceGetCount(),
            "name": self._get("nvmlDeviceGetName", _text),
            "capability": self._get("nvmlDeviceGetCudaComputeCapability", tuple),
            "total_bytes": lambda index: self._memory(index).total,
            "free_bytes": lambda index: self._memory(index).free,
            "pcie_generation": self._get("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": self._get("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_max_width": self._get("nvmlDeviceGetMaxPcieLinkWidth"),
            "power_limit_watts": self._get("nvmlDeviceGetEnforcedPowerLimit", _watts),
            "default_power_limit_watts": self._get(
                "nvmlDeviceGetPowerManagementDefaultLimit", _watts
            ),
            "mig": self._get("nvmlDeviceIsMigDeviceHandle", lambda it: getattr(it, "value", it)),
            "display_active": self._get("nvmlDeviceGetDisplayActive"),
            "other_process_bytes": self._other_process_bytes,
            "links": self._links,
            "clock_mhz": self._get("nvmlDeviceGetClockInfo", int, 1),
            "temperature_celsius": self._get("nvmlDeviceGetTemperature", int, 0),
            "power_watts": self._get("nvmlDeviceGetPowerUsage", _watts),
        }

    def _nvml(self) -> Any:
        import pynvml

        if not self._initialized:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unavailable(str(error)) from error
            self._initialized = True
        return pynvml

    def _handle(self, index: int) -> Any:
        nvml = self._nvml()
        if self._uuid_of is None:
            return nvml.nvmlDeviceGetHandleByIndex(index)
        name = self._uuid_of(index)
        for prefix in ("GPU-", "MIG-"):
            try:
                return nvml.nvmlDeviceGetHandleByUUID(prefix + name)
            except nvml.NVMLError:
                continue
        raise Unavailable(f"no device with UUID {name}")

    def _get(
        self, function: str, convert: Callable[[Any], object] = lambda value: value, *more: int
    ) -> Query:
        return lambda index: convert(getattr(self._nvml(), function)(self._handle(index), *more))

    def _memory(self, index: int) -> Any:
        nvml = self._nvml()
        return nvml.nvmlDeviceGetMemoryInfo(self._handle(index), version=nvml.nvmlMemory_v2)

    def _other_process_bytes(self, index: int) -> int:
        nvml, handle = self._nvml(), self._handle(index)
        processes = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
        held = {process.pid: process.usedGpuMemory for process in processes}
        held.pop(os.getpid(), None)
        if None in held.values():
            raise Unavailable(f"{len(held)} other processes, whose memory no driver reports")
        return sum(held.values())

    def _links(self, index: int) -> list[tuple[int, str]]:
        nvml, handle = self._nvml(), self._handle(index)
        links = []
        for peer in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(peer)
            if nvml.nvmlDeviceGetUUID(other) == nvml.nvmlDeviceGetUUID(handle):
                continue
            status = nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            path = TOPOLOGY_PATHS[nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)]
            links.append((peer, "nvlink" if status == nvml.NVML_P2P_STATUS_OK else path))
        return links


class DriverSource:
    """The CUDA driver API through ctypes. `cuInit` and attribute queries open no context."""

    def __init__(self) -> None:
        self._library: Any = None
        self.queries: Mapping[str, Query] = {
            "count": lambda _: self._integer("cuDeviceGetCount"),
            "cuda_driver": lambda _: _dotted(self._integer("cuDriverGetVersion")),
            "integrated": lambda index: self._attribute(CU_ATTRIBUTE_INTEGRATED, index),
            "host_page_tables": lambda index: self._attribute(CU_ATTRIBUTE_HOST_PAGE_TABLES, index),
        }

    def _call(self, function: str, *arguments: Any) -> None:
        if self._library is None:
            library = ctypes.CDLL("libcuda.so.1")
            if status := library.cuInit(0):
                raise Unavailable(f"cuInit failed with error {status}")
            self._library = library
        if status := getattr(self._library, function)(*arguments):
            raise Unavailable(f"{function} failed with error {status}")

    def _integer(self, function: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self._call(function, ctypes.byref(value), *arguments)
        return value.value

    def uuid(self, index: int) -> str:
        """Return the UUID of CUDA device `index`; of the slice, under MIG."""
        buffer = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", buffer, self._integer("cuDeviceGet", index))
        return str(uuid.UUID(bytes=bytes(buffer)))

    def _attribute(self, attribute: int, index: int) -> int:
        return self._integer("cuDeviceGetAttribute", attribute, self._integer("cuDeviceGet", index))


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"  # 13000 is 13.0, 12040 is 12.4


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _watts(milliwatts: float) -> float:
    return milliwatts / 1000


class System:
    """This machine, or in tests a fake one. The doctor asks without torch."""

    def __init__(self, *, with_torch: bool = True) -> None:
        driver = DriverSource()
        self._sources: dict[str, Mapping[str, Query]] = {
            "os": OS_QUERIES,
            # The doctor examines all GPUs, in NVML's order, including those hidden from CUDA.
            "nvml": NvmlSource(driver.uuid if with_torch else None).queries,
            "driver": driver.queries,
            "torch": TORCH_QUERIES if with_torch else {},
        }

    def query(self, source: str, name: str, index: int = 0) -> object:
        """Return the raw value for device `index`, which sources without devices ignore. Raises
        Unavailable if the source is missing, failed, or does not support the query."""
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


# The first query imports torch; the doctor asks none.
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


def _require(value: object, otherwise: str) -> object:
    if value is None:
        raise Unavailable(otherwise)
    return value


def cudnn_version() -> str | None:
    """Return the version of cuDNN that torch loads, if any."""
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    base = 10_000 if number >= 90_000 else 1000  # 91002 is 9.10.2, but 8902 is 8.9.2
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _package(name: str) -> object:
    """`torch_cuda` and `torch_hip` tell how torch was built, without importing it;
    `torchvision_needs` is the torch that an installed torchvision was built for, `unmet` what
    autotune needs and what is there instead: a version, nothing or `files are missing`."""
    if name == "unmet":
        needed = importlib.metadata.requires("lora-autotune") or ()
        return tuple((each, there) for each in needed if (there := _instead_of(each)) is not None)
    if name == "torchvision_needs":
        needs = importlib.metadata.requires("torchvision") or []
        found = next((need for need in needs if need.startswith("torch==")), None)
        return str(_require(found, "any torch"))
    if name in ("torch_cuda", "torch_hip"):
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise Unavailable("torch is not installed")
        text = (Path(spec.origin).parent / "version.py").read_text()
        pattern = rf"^{name.removeprefix('torch_')}\b[^=]*=\s*'([^']+)'"
        match = re.search(pattern, text, re.MULTILINE)
        return str(_require(match and match.group(1), "this torch is built without it"))
    return importlib.metadata.version(name)


def _instead_of(needed: str) -> str | None:
    requirement = Requirement(needed)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    try:
        found = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    first = next((file for file in found.files or () if file.suffix == ".py"), None)
    if first is not None and not Path(str(first.locate())).exists():
        return "files are missing"
    return None if requirement.specifier.contains(found.version, True) else found.version


CPUINFO = Path("/proc/cpuinfo")
# Prints the name of an Apple chip, which Python does not know: to it each is `arm`.
BRAND = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")


def _cpu(_: int) -> str:
    """On Arm servers, whose kernel knows no name, the numbers of implementer and part."""
    if platform.system() == "Darwin":
        return subprocess.check_output(BRAND, text=True, timeout=5, stderr=subprocess.PIPE).strip()
    text = _content(CPUINFO)
    if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE):
        return found.group(1)
    name = platform.processor() or platform.machine()
    ids = r"^CPU implementer\s*:\s*(\w+)\n(?:.+\n)*?CPU part\s*:\s*(\w+)"
    if found := re.search(ids, text, re.MULTILINE):
        name = f"{name} {found.group(1)}/{found.group(2)}"
    return str(_require(name or None, "no name"))


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60  # from this size on, a limit of cgroup v1 means that there is none


def _limits(controller: str, *files: str) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """(control group, numbers in its `files`) of this process's group and each group above it.
    A container sees its own group as the root; a Slurm job or a systemd service is a group further
    down. Under cgroup v1 each controller has its own hierarchy, and a container reads its path as
    the host sees it."""
    lines = _content(OWN_CGROUP).splitlines() or ["0::/"]
    for _, names, own in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        group = root / own.lstrip("/")
        for place in (group, *group.parents):
            found = tuple(n for file in files for n in _numbers(place / file))
            if place.is_relative_to(root) and found:
                yield place, found


def _numbers(file: Path) -> tuple[int, ...]:
    try:
        return tuple(map(int, _content(file).split()))
    except ValueError:
        return ()


def _content(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _logical_cores(_: int) -> int:
    found = (*_limits("cpu", "cpu.max"), *_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    valid = [numbers for _, numbers in found if len(numbers) == 2 and min(numbers) > 0]
    return max(1, min((usable_cores(), *(quota // period for quota, period in valid))))


def memory_limits() -> list[tuple[int, int]]:
    """List each group's limit in bytes, and what is left of it: page cache counts as left."""
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
    """Return the memory of the machine, or of the container or job within it."""
    return min((psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())))


def available_bytes() -> int:
    """Return what the host, and a container or job, can give without swapping."""
    limits = memory_limits() if _is_limited() else ()
    return min((host_available_bytes(), *(left for _, left in limits)))


@cache
def _is_limited() -> bool:
    """Cached, since reading the limits takes 0.3 ms, too long for every look."""
    return bool(memory_limits())


def host_available_bytes() -> int:
    """Return what the whole host can give without swapping (MemAvailable)."""
    return int(psutil.virtual_memory().available)


def _container(_: int) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    for marker, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if Path(marker).exists():
            return name
    raise Unavailable("none detected")


def _compiler(_: int) -> str:
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    found = next(filter(None, map(shutil.which, names)), None)
    return str(_require(found, "none on PATH"))


def _disk_free_bytes(_: int) -> int:
    """Free space for models: in the hub's cache, or the nearest folder above it that exists."""
    from huggingface_hub import constants

    cache_folder = Path(constants.HF_HUB_CACHE).absolute()
    folder = next(each for each in (cache_folder, *cache_folder.parents) if each.exists())
    return shutil.disk_usage(folder).free


def _nvidia_cards(_: int) -> int:
    cards = 0
    for device in Path("/sys/bus/pci/devices").iterdir():
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        cards += vendor == "0x10de" and kind.startswith("0x03")
    return cards


OS_QUERIES: Mapping[str, Query] = {
    "cpu": _cpu,
    "physical_cores": lambda _: psutil.cpu_count(logical=False),
    "logical_cores": _logical_cores,
    "memory_bytes": lambda _: memory_bytes(),
    "available_bytes": lambda _: host_available_bytes(),
    "container_free_bytes": lambda _: _require(
        min((left for _, left in memory_limits()), default=None), "no limit"
    ),
    "swap_bytes": lambda _: psutil.swap_memory().total,
    "system": lambda _: f"{platform.system()} {platform.release()}",
    "wsl": lambda _: "microsoft" in platform.release().lower(),
    "container": _container,
    "compiler": _compiler,
    "gpu_direct_storage": lambda _: Path("/dev/nvidia-fs0").exists(),
    "disk_free_bytes": _disk_free_bytes,
    "nvidia_cards": _nvidia_cards,
    "python": lambda _: platform.python_version(),
}
