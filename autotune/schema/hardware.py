"""The frozen objects that describe a machine.

What is unknown is None, never 0, and `HardwareProfile.provenance` says where each fact came from or why it is absent.
"""

import re
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic import Field

from autotune.schema.base import TRIAL_PROTOCOL_VERSION, Frozen, NaturalInt, PositiveInt, digest_of

DeviceKind = Literal["cuda", "mps", "cpu"]
MemoryKind = Literal["discrete", "integrated", "coherent", "host"]


class Link(Frozen):
    """How the device reaches another GPU of the same machine."""

    peer_index: int = NaturalInt
    path: str
    """`nvlink`, or what the bytes cross otherwise: `same board`, `pcie switch`, `host bridge`, `cpu sockets`."""


class Device(Frozen):
    """One device that can train, as its runtime reports it. What is unknown is None, never 0."""

    kind: DeviceKind
    index: int = NaturalInt
    count: int = Field(default=1, ge=1)
    """Devices of this kind that are visible, this one included."""
    name: str
    """As the runtime reports it, e.g. `NVIDIA GeForce RTX 4090`."""
    compute_capability: tuple[int, int] | None = None
    """(major, minor) on CUDA devices."""
    sm_count: int | None = None
    l2_bytes: int | None = None
    memory_kind: MemoryKind
    memory_kind_reason: str
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """Free when the profile was made, before this process used the device."""
    budget_bytes: int = NaturalInt
    """What a run may really take, overhead of its own process included."""
    budget_reason: str
    budget_set_by_user: bool = False
    """True where an option changed the budget: what is measured within it is no evidence for others."""
    pcie_generation: int | None = None
    """Highest that card and slot agree on: an idle card shows less."""
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    mig: bool | None = None
    """True on a slice of a GPU."""
    drives_display: bool | None = None
    other_process_bytes: int | None = None
    """Device memory that other processes hold."""
    links: tuple[Link, ...] = ()

    @property
    def file_name(self) -> str:
        """The name, as far as it can be part of a file's."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60] or "device"

    @property
    def torch_name(self) -> str:
        """`cuda:0`, `mps` or `cpu`."""
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind


class Host(Frozen):
    """The computer around the device."""

    cpu: str
    physical_cores: int | None = None
    logical_cores: int = PositiveInt
    """Those that this process may use."""
    memory_bytes: int = PositiveInt
    available_memory_bytes: int = NaturalInt
    """What can be taken without swapping; in a container at most what its limit leaves."""
    swap_bytes: int | None = None
    system: str
    """Operating system and release, e.g. `Linux 6.1`."""
    memory_model: Literal["linux", "wsl", "windows", "macos"]
    """What an over-allocation meets."""
    container: str | None = None
    """`docker`, `podman`, `kubernetes` ... or None outside one."""
    compiler: str | None = None
    """The C compiler that triton and torch.compile would call."""
    gpu_direct_storage: bool | None = None
    """Whether `/dev/nvidia-fs0` exists."""


class Versions(Frozen):
    """Versions of what decides how a step runs; None where it is absent."""

    python: str
    torch: str | None = None
    cuda_runtime: str | None = None
    """Of the CUDA that torch was built with."""
    cuda_driver: str | None = None
    """Newest CUDA that the driver supports."""
    driver: str | None = None
    cudnn: str | None = None
    triton: str | None = None
    diffusers: str | None = None
    transformers: str | None = None
    peft: str | None = None
    accelerate: str | None = None
    torchao: str | None = None
    bitsandbytes: str | None = None
    fastsafetensors: str | None = None
    xformers: str | None = None
    flash_attn: str | None = None
    kernels: str | None = None
    """The package that fetches prebuilt attention kernels."""
    sageattention: str | None = None

    def has(self, library: str, min_version: str = "0") -> bool:
        """Whether a library, by its field, is there in `min_version` or a newer one, compared as versions."""
        version: str | None = getattr(self, library)
        try:
            return version is not None and Version(version.split("+")[0]) >= Version(min_version)
        except InvalidVersion:
            return False


class Capability(Frozen):
    """Whether this machine can use a feature, and why or why not. Names: see `autotune/hardware/capabilities.py`."""

    name: str
    available: bool
    reason: str


class Conditions(Frozen):
    """The state of a GPU while a rate was measured."""

    clock_mhz: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None


class Rate(Frozen):
    """One measured rate: the median of several timings."""

    name: str
    """Dotted: what, variant, shape; e.g. `matmul.bf16.4096x3072x3072`."""
    value: float = Field(gt=0)
    unit: Literal["FLOP/s", "B/s", "B", "s"]
    spread: float = Field(ge=0)
    """Interquartile range over the median."""
    num_samples: int = PositiveInt
    conditions: Conditions | None = None


class Datasheet(Frozen):
    """A GPU's published figures, dense and with fp32 accumulation. Never a measurement of this machine."""

    id: str
    """Name in the catalog, e.g. `nvidia-rtx-4090`."""
    bf16_flops_per_second: float | None = None
    reached_bf16_flops_per_second: float | None = None
    """By large products alone, where somebody measured it or a sibling."""
    tf32_flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    """One direction to the host: 16 lanes after encoding, or the faster link that is there in their place (GH200)."""
    power_watts: float | None = None
    confidence: str
    source: str


class Provenance(Frozen):
    """Where one fact came from, or why it is absent."""

    fact: str
    """Field of the profile, e.g. `device.sm_count`."""
    source: str | None
    """Who answered, e.g. `CUDA runtime`; None when nobody did."""
    absent_because: str | None = None


class HardwareProfile(Frozen):
    """A machine with one device, in a form that two teams can compare."""

    origin: Literal["probe", "catalog"] = "probe"
    """`catalog`: a GPU that nobody measured here; host and versions are assumed, and `notes` says so."""
    device: Device
    host: Host
    versions: Versions
    capabilities: tuple[Capability, ...] = ()
    rates: tuple[Rate, ...] = ()
    datasheet: Datasheet | None = None
    noisy: bool = False
    """True when repeated timings disagreed, so that rates deserve less trust."""
    notes: tuple[str, ...] = ()
    """What a reader should know: overrides, deprecations, assumptions, what was not measured and why."""
    provenance: tuple[Provenance, ...] = ()

    @property
    def match_keys(self) -> dict[str, str | None]:
        """The facts that decide whether a tuning carries over to another machine."""
        capability = self.device.compute_capability
        return {
            "device_kind": self.device.kind,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "memory_kind": self.device.memory_kind,
            "memory_model": self.host.memory_model,
            "torch": _minor(self.versions.torch),
            "cuda": _major(self.versions.cuda_runtime),
            "torchao": self.versions.torchao,
            "bitsandbytes": self.versions.bitsandbytes,
            "trial_protocol": str(TRIAL_PROTOCOL_VERSION),
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the hard keys: equal where a tuning may be reused."""
        return digest_of(dict(self.match_keys))

    def capability(self, name: str) -> Capability:
        """The capability called `name`; one that the profile does not list is unavailable, and says so."""
        found = next((capability for capability in self.capabilities if capability.name == name), None)
        return found or Capability(name=name, available=False, reason=f"this profile says nothing about {name}")

    def rate(self, name: str) -> float | None:
        """The measured rate called `name` in its unit, or None."""
        return next((rate.value for rate in self.rates if rate.name == name), None)


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def _major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]
