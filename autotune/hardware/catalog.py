"""The GPUs that autotune knows without seeing them: published figures, one file each in `profiles/hardware`.

A catalog profile plans for a card that nobody here owns. It has no rates, only a datasheet; its host and versions
are assumed, and its notes say so.
"""

import importlib.metadata
import platform
import re
from functools import cache
from importlib.resources import files

import yaml
from pydantic import Field

from autotune.hardware.capabilities import CUDA_13, capabilities_of, without_bf16
from autotune.hardware.facts import PACKAGES
from autotune.hardware.memory import budget
from autotune.schema import Datasheet, Device, Frozen, HardwareProfile, Host, MemoryKind, Versions

ASSUMED_HOST_BYTES = 64 * 2**30
ASSUMED_VERSIONS = {
    "bitsandbytes": "0.48.0",
    "cuda_runtime": "13.0",
    "cuda_driver": "13.0",
    "cudnn": "9.20.0",
    "driver": "580",
    "triton": "3.5",
}
OLD_CARDS_CUDA = "12.6"
"""The CUDA of torch's last builds for cards that CUDA 13 left out (pytorch#172352)."""
PCIE_BYTES_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Per second, one direction, after line encoding (PCI-SIG)."""
SAME_MEMORY = 0.15
"""Names are shared by cards of other sizes (RTX 3060 8 GB): sizes may differ by this share at most."""


class CatalogGpu(Frozen):
    """One GPU's published figures. Peaks are dense, with fp32 accumulation unless the name says otherwise."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    name: str
    """As CUDA reports it."""
    match: str
    """Expression that finds this card, and no sibling, in the name that CUDA reports."""
    architecture: str
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    memory_kind: MemoryKind
    memory: str
    memory_nominal_gb: float
    memory_cuda_mib: int | None = None
    """What CUDA reports, where somebody saw it."""
    memory_gb_per_second: float
    sm_count: int
    l2_mib: float | None = None
    power_watts: float
    pcie_generation: int | None = None
    pcie_lanes: int = 16
    host_gb_per_second: float | None = None
    """One direction to the host's memory, where something faster than PCIe leads there (NVLink-C2C)."""
    dense_tflops: dict[str, float]
    """By dtype of the inputs; `fp32` is that of the plain units, given where there is no bf16 to train in."""
    measured_tflops: dict[str, float] = Field(default_factory=dict)
    """Products measured by others with cuBLASLt."""
    confidence: str
    source: str
    notes: str = ""

    @property
    def memory_bytes(self) -> int:
        """What CUDA reports, or else 97% of the nominal size: the driver keeps some."""
        if self.memory_cuda_mib is not None:
            return self.memory_cuda_mib * 2**20
        return int(self.memory_nominal_gb * 2**30 * 0.97)

    @property
    def training_dtype(self) -> str:
        """What training computes in: bf16 wherever the card has units for it."""
        return "bf16" if "bf16" in self.dense_tflops else "fp32"

    @property
    def training_tflops(self) -> float:
        """The peak in that dtype."""
        return self.dense_tflops.get(self.training_dtype, 0.0)

    @property
    def _reached_bf16(self) -> float | None:
        """FLOP/s of large bf16 products alone. Cards that accumulate fp32 at half rate are not held back by power:
        those measured reach 1.08 (RTX 4090) and 1.21 (RTX 5090) of their peak."""
        if "bf16" in self.measured_tflops:
            return self.measured_tflops["bf16"] * 1e12
        peak, half = self.dense_tflops.get("bf16"), self.dense_tflops.get("fp16_fp16_accumulate", 0)
        return peak * 1e12 if peak is not None and half > 1.5 * peak else None

    @property
    def datasheet(self) -> Datasheet:
        """The figures that profiles carry."""
        peaks = {name: value * 1e12 for name, value in self.dense_tflops.items()}
        lane = PCIE_BYTES_PER_LANE.get(self.pcie_generation or 0)
        link = None if self.host_gb_per_second is None else self.host_gb_per_second * 1e9
        return Datasheet(
            id=self.id,
            bf16_flops_per_second=peaks.get("bf16"),
            reached_bf16_flops_per_second=self._reached_bf16,
            tf32_flops_per_second=peaks.get("tf32"),
            fp32_flops_per_second=peaks.get("fp32"),
            memory_bytes_per_second=self.memory_gb_per_second * 1e9,
            pcie_bytes_per_second=link or (None if lane is None else self.pcie_lanes * lane),
            power_watts=self.power_watts,
            confidence=self.confidence,
            source=self.source,
        )


@cache
def load_catalog() -> tuple[CatalogGpu, ...]:
    """Every GPU of the catalog, by compute capability and then peak."""
    folder = files("autotune") / "profiles" / "hardware"
    gpus = [
        CatalogGpu.model_validate(yaml.safe_load(entry.read_text(encoding="utf-8")))
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    ]
    return tuple(sorted(gpus, key=lambda gpu: (float(gpu.compute_capability), gpu.training_tflops, gpu.id)))


def matching(name: str, total_memory_bytes: int | None) -> CatalogGpu | None:
    """The catalog's card for a name that CUDA reports, or None: siblings, slices and other sizes match nothing."""
    if "MIG" in name:
        return None
    for gpu in load_catalog():
        if not re.search(gpu.match, name):
            continue
        if total_memory_bytes is None or abs(total_memory_bytes / gpu.memory_bytes - 1) <= SAME_MEMORY:
            return gpu
    return None


def profile_of_gpu(gpu: CatalogGpu) -> HardwareProfile:
    """A profile to plan with, for a Linux host of 64 GiB with this environment's packages and the card's last CUDA."""
    device = _device(gpu)
    shared = gpu.memory_kind == "integrated"
    memory = gpu.memory_bytes if shared else ASSUMED_HOST_BYTES
    host = Host(
        cpu="assumed",
        logical_cores=16,
        memory_bytes=memory,
        available_memory_bytes=int(0.9 * memory),
        system="Linux",
        memory_model="linux",
        compiler="assumed",
        gpu_direct_storage=False,
    )
    versions = _assumed_versions(device)
    return HardwareProfile(
        origin="catalog",
        device=device,
        host=host,
        versions=versions,
        capabilities=capabilities_of(device, host, versions),
        datasheet=gpu.datasheet,
        notes=(
            f"from the catalog, not measured; figures: {gpu.confidence} confidence",
            f"assumed: {memory / 2**30:.0f} GiB of host memory, CUDA {versions.cuda_runtime}, driver 580, a C compiler,"
            " no display, and this environment's packages",
            *without_bf16(device),
            *((gpu.notes,) if gpu.notes else ()),
        ),
    )


def _device(gpu: CatalogGpu) -> Device:
    total = gpu.memory_bytes
    free = int(0.9 * total) if gpu.memory_kind == "integrated" else total
    budget_bytes, why = budget(gpu.memory_kind, total, free, None)
    major, minor = gpu.compute_capability.split(".")
    return Device(
        kind="cuda",
        index=0,
        name=gpu.name,
        compute_capability=(int(major), int(minor)),
        sm_count=gpu.sm_count,
        l2_bytes=None if gpu.l2_mib is None else int(gpu.l2_mib * 2**20),
        memory_kind=gpu.memory_kind,
        memory_kind_reason=f"the catalog says: {gpu.memory}",
        total_memory_bytes=total,
        free_memory_bytes=free,
        budget_bytes=budget_bytes,
        budget_reason=why,
        pcie_generation=gpu.pcie_generation,
        power_limit_watts=gpu.power_watts,
        default_power_limit_watts=gpu.power_watts,
    )


def _assumed_versions(device: Device) -> Versions:
    """This environment's packages; what only a GPU machine has is assumed."""
    old = device.compute_capability is not None and device.compute_capability < CUDA_13
    found = {"cuda_runtime": OLD_CARDS_CUDA} if old else {}
    for field, package in PACKAGES.items():
        try:
            found[field] = importlib.metadata.version(package).split("+")[0]  # not how this one was built
        except importlib.metadata.PackageNotFoundError:
            continue
    return Versions(python=platform.python_version(), **(ASSUMED_VERSIONS | found))
