"""The frozen objects that describe a machine.

What is unknown is None, never 0.
"""

import re
from typing import Literal, Self

from packaging.version import InvalidVersion, Version
from pydantic import Field, model_validator

from autotune.plan.base import TRIAL_PROTOCOL_VERSION, Frozen, NaturalInt, PositiveInt, digest_of
from autotune.plan.candidate import Outcome

KEY_NAMES: dict[str, str] = {
    "device_kind": "kind of device",
    "compute_capability": "compute capability",
    "memory_kind": "memory kind",
    "memory_model": "operating system's memory model",
    "torch": "torch version",
    "cuda": "CUDA major version",
    "torchao": "torchao version",
    "bitsandbytes": "bitsandbytes version",
    "trial_protocol": "autotune's trial protocol",
}
"""Names for people of the keys of `HardwareProfile.match_keys`."""

DeviceKind = Literal["cuda", "mps", "cpu"]
MemoryKind = Literal["discrete", "integrated", "coherent", "host"]


class Link(Frozen):
    """The way from the device to another GPU of the same machine."""

    peer_index: int = NaturalInt
    path: str
    """`nvlink`, or what bytes cross: `same board`, `pcie switch`, `host bridge`, `cpu sockets`."""


class OtherGpu(Frozen):
    """Another visible GPU of the same machine, as far as it can encode for the one that trains."""

    index: int = NaturalInt
    name: str
    total_memory_bytes: int = PositiveInt
    budget_bytes: int = NaturalInt


class Device(Frozen):
    """One device that can train, as its runtime reports it."""

    kind: DeviceKind
    index: int = NaturalInt
    count: int = Field(default=1, ge=1)
    """Number of visible devices of this kind, this one included."""
    name: str
    """Name that the runtime reports, e.g. `NVIDIA GeForce RTX 4090`."""
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
    """Memory that a run may use, its process's own overhead included."""
    budget_reason: str
    budget_set_by_user: bool = False
    """True if an option changed it: what is measured within it is no evidence for other users."""
    pcie_generation: int | None = None
    """Highest that both card and slot support; an idle card runs at less."""
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
    others: tuple[OtherGpu, ...] = ()
    """The machine's other visible GPUs whose memory is known; none in older profiles."""

    @property
    def file_name(self) -> str:
        """The name with only characters that a file name may have."""
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
    """Number of cores that this process may use."""
    memory_bytes: int = PositiveInt
    available_memory_bytes: int = NaturalInt
    """Memory to allocate without swapping; in a container at most what its limit leaves."""
    swap_bytes: int | None = None
    system: str
    """Operating system and release, e.g. `Linux 6.1`."""
    memory_model: Literal["linux", "wsl", "windows", "macos"]
    """The operating system's way to handle an over-allocation."""
    container: str | None = None
    """`docker`, `podman`, `kubernetes` ... or None outside one."""
    compiler: str | None = None
    """The C compiler that triton and torch.compile would call."""
    gpu_direct_storage: bool | None = None
    """True if `/dev/nvidia-fs0` exists."""


class Versions(Frozen):
    """Versions of what decides how a step runs; None if it is not installed."""

    python: str
    torch: str | None = None
    cuda_runtime: str | None = None
    """Version of CUDA that torch was built with."""
    cuda_driver: str | None = None
    """Newest version of CUDA that the driver supports."""
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
    flash_attn_3: str | None = None
    flash_attn_4: str | None = None
    kernels: str | None = None
    """The package that fetches prebuilt attention kernels."""
    sageattention: str | None = None

    def has(self, library: str, min_version: str = "0") -> bool:
        """Tell if `library`, a field, is installed in `min_version` or newer."""
        return is_at_least(getattr(self, library), min_version)


def is_at_least(version: str | None, min_version: str) -> bool:
    """Tell if a version is that or newer, as versions ("9.0" < "13.0"); False if there is none."""
    try:
        return version is not None and Version(version.split("+")[0]) >= Version(min_version)
    except InvalidVersion:
        return False


class Capability(Frozen):
    """A feature that this machine can or cannot use (`autotune/machine/capabilities.py`)."""

    name: str
    available: bool
    reason: str
    outcome: Outcome | None = None
    """End of a check that told nothing; None if it is known."""


class Conditions(Frozen):
    """The state of a GPU while a rate was measured."""

    clock_mhz: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None


class Rate(Frozen):
    """One measured rate: the median of several timings."""

    name: str
    """Dotted: what, variant, shape; e.g. `matmul.bf16.4096x3072x3072`."""
    value: float = Field(ge=1e-15, le=1e24)
    """Far beyond anything that is measured: the file is damaged, or lies."""
    unit: Literal["FLOP/s", "B/s", "B", "s"]
    spread: float = Field(ge=0)
    """Interquartile range over the median."""
    num_samples: int = PositiveInt
    conditions: Conditions | None = None


class Datasheet(Frozen):
    """A GPU's published figures, dense and with fp32 accumulation; never a measurement."""

    id: str
    """Name in the catalog, e.g. `nvidia-rtx-4090`."""
    bf16_flops_per_second: float | None = None
    reached_bf16_flops_per_second: float | None = None
    """Rate of large products alone, if somebody measured it on this card or a sibling."""
    tf32_flops_per_second: float | None = None
    fp32_flops_per_second: float | None = None
    """Without tensor cores, of cards that have neither bf16 nor TF32."""
    fp16_flops_per_second: float | None = None
    """With tensor cores, of cards that have no bf16; others are as fast in both."""
    reached_fp16_flops_per_second: float | None = None
    int8_flops_per_second: float | None = None
    fp8_flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    """To the host in one direction, after encoding; of a faster link if there is one (GH200)."""
    power_watts: float | None = None
    confidence: str
    source: str


class HardwareProfile(Frozen):
    """A machine with one device: its facts, what it can use, and how fast it was measured to be."""

    origin: Literal["probe", "catalog"] = "probe"
    """`catalog` for a GPU that was not measured; its host and versions are assumed (`notes`)."""
    device: Device
    host: Host
    versions: Versions
    capabilities: tuple[Capability, ...] = ()
    rates: tuple[Rate, ...] = ()
    datasheet: Datasheet | None = None
    noisy: bool = False
    """True if repeated timings disagreed, so that the rates are less reliable."""
    notes: tuple[str, ...] = ()
    """Remarks for people: overrides, assumptions, what was not measured and why."""
    assumed: tuple[str, ...] = ()
    """Packages that a card of the catalog was told to have, as fast as published."""
    fingerprint: str = ""
    """Identifies the machine: a digest of a GPU's name, compute capability, memory kind and
    size, CUDA version and driver, or of a CPU's name, cores and memory. It is always derived;
    what may be reused is judged by `match_keys`."""

    @model_validator(mode="after")
    def _identify(self) -> Self:
        device, memory = self.device, self.device.total_memory_bytes
        facts: dict[str, object] = {
            "kind": device.kind,
            "name": device.name,
            "memory_kind": device.memory_kind,
            "memory_gib": None
            if memory is None
            else round(memory / 2**30),  # systems reserve some, more or less
        }
        if device.kind == "cuda":
            facts["compute_capability"] = device.compute_capability
            facts |= {"cuda": self.versions.cuda_runtime, "driver": self.versions.driver}
        else:
            facts["cores"] = self.host.physical_cores
        self.__dict__["fingerprint"] = digest_of(facts)
        return self

    @property
    def match_keys(self) -> dict[str, str | None]:
        """The facts that decide whether a plan, a record or a rate holds on another machine too."""
        capability = self.device.compute_capability
        return {
            "device_kind": self.device.kind,
            "compute_capability": None
            if capability is None
            else f"{capability[0]}.{capability[1]}",
            "memory_kind": self.device.memory_kind,
            "memory_model": self.host.memory_model,
            "torch": _beginning(self.versions.torch, 2),
            "cuda": _beginning(self.versions.cuda_runtime, 1)
            if self.device.kind == "cuda"
            else None,
            "torchao": self.versions.torchao,
            "bitsandbytes": self.versions.bitsandbytes,
            "trial_protocol": str(TRIAL_PROTOCOL_VERSION),
        }

    def capability(self, name: str) -> Capability:
        """Find the capability called `name`; one that is not listed is unavailable."""
        found = next((each for each in self.capabilities if each.name == name), None)
        unknown = f"this profile says nothing about {name}"
        return found or Capability(name=name, available=False, reason=unknown)

    @property
    def lacks(self) -> dict[str, str]:
        """Why each capability is missing that is known to be."""
        return {each.name: each.reason for each in self.capabilities if not each.available}

    @property
    def process_overhead_bytes(self) -> int:
        """Device memory that a process takes besides its tensors: measured, else a GPU's usual
        context. On a CPU, where the device's memory is the host's, the libraries' part."""
        usual = {"cpu": CPU_PROCESS_BYTES, "cuda": CUDA_CONTEXT_BYTES}.get(self.device.kind, 0)
        measured = self.rate("process.overhead") if self.device.kind == "cuda" else None
        return usual if measured is None else int(measured)

    def rate(self, name: str) -> float | None:
        """Find the measured rate called `name` in its unit, or None."""
        return next((rate.value for rate in self.rates if rate.name == name), None)

    def rates_under(self, prefix: str) -> dict[str, float]:
        """Return measured rates whose names begin with `prefix`, by what follows it."""
        rates = (rate for rate in self.rates if rate.name.startswith(prefix))
        return {rate.name.removeprefix(prefix): rate.value for rate in rates}


def _beginning(version: str | None, num_parts: int) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:num_parts])


CUDA_CONTEXT_BYTES = 500 << 20
"""Context, kernels and library handles of a PyTorch process: 400 to 600 MiB on recent cards."""


CPU_PROCESS_BYTES = 420 << 20
"""Memory of a process that trains on the CPU besides its tensors: Python, torch, diffusers and
transformers. 390 to 440 MiB were measured (`benchmarks/run_memory.py`); the first trial replaces
this figure by its own."""


def shares_host_memory(kind: MemoryKind) -> bool:
    """Tell if the device's memory is the host's: running out hangs the machine before any error."""
    return kind in ("integrated", "host")
