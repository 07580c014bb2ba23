"""The GPUs that can be planned for without owning one: published figures, `profiles/hardware.csv`.

A catalog profile has no rates, only a datasheet; its host and versions are assumed.
"""

import csv
import importlib.metadata
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from packaging.version import Version
from pydantic import BeforeValidator, Field, ValidationError

from autotune.errors import InvalidInput, match_names
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.machine import capabilities, facts
from autotune.plan.base import Frozen, first_problem
from autotune.plan.file import TEXT_TAG, BoundedLoader, read_listing
from autotune.plan.hardware import Datasheet, Device, HardwareProfile, Host, MemoryKind, Versions
from autotune.system.files import shipped_path

ASSUMED_HOST_BYTES = 64 * 2**30
ASSUMED_VERSIONS = {
    "bitsandbytes": "0.48.0",
    "cuda_runtime": "13.0",
    "cuda_driver": "13.0",
    "cudnn": "9.20.0",
    "driver": "580",
    "triton": "3.5",
}
# CUDA version of torch's last builds for cards that CUDA 13 no longer supports (pytorch#172352).
OLD_CARDS_CUDA = "12.6"
# PCIe generation: bytes per second in one direction, after line encoding (PCI-SIG).
PCIE_BYTES_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# Relative difference in size of the same card: an RTX 3060 of 8 GB has the name of another.
MEMORY_TOLERANCE = 0.15
SERIES = ("nvidia", "geforce", "rtx", "tesla")  # words that may be omitted from a GPU's name
VARIANTS = frozenset({"ti", "super", "laptop", "max"})  # words that name another card
MIN_LIKENESS = 0.7  # of a name that is offered for an unknown one: 4095 is nearer to 4090 than this
NVIDIA_ONLY = "it knows NVIDIA's GPUs; with {} one, only the CPU would train"
# Cards that people name, by their names without spaces, and why there is no plan for them.
NOT_COVERED = (
    (
        r"^(nvidia|geforce|gtx)*(9[5-8]0|10[1-8]0)(ti)?(\d+gb)?$|titanx|^(tesla|quadro)*[pmk]\d{2,4}$",
        "it has no tensor cores and no bf16, and PyTorch's builds for CUDA 13 have no code for it",
    ),
    (
        r"^(nvidia|geforce|gtx)*16[356]0(ti|super)*$|^(nvidia)?t\d{3,4}$",
        "it has no tensor cores, and fp16 gives NaN",
    ),
    (
        r"orin|xavier|jetson(agx)?(nano|tx)",
        "PyTorch's own builds have no code for its GPU; with NVIDIA's for JetPack, `autotune plan` "
        "on the device tries what fits",
    ),
    (r"amd|radeon|^rx\d|instinct|^mi\d{3}|ryzen|strix|7900xt", NVIDIA_ONLY.format("an AMD")),
    (r"intel|arc|gaudi|^[ab][357][5-8]0$", NVIDIA_ONLY.format("an Intel")),
    (
        r"apple|mac|^m\d(pro|max|ultra)?(\d+gb)?$",
        "Apple's GPUs are not in the catalog; on the Mac itself, `autotune plan` tries what fits",
    ),
)


class CatalogGpu(Frozen):
    """One GPU's published figures. Peaks are dense, with fp32 accumulation."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    name: str  # as CUDA reports it
    other_names: Annotated[tuple[str, ...], BeforeValidator(lambda text: (*text.split("|"),))] = ()
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    memory_kind: MemoryKind
    memory: str
    memory_nominal_gb: float
    memory_cuda_mib: int | None = None  # as CUDA reports it, if known
    memory_gb_per_second: float
    sm_count: int
    l2_mib: float | None = None
    min_power_watts: float | None = None  # of laptops, which set a limit between this and the next
    power_watts: float
    pcie_generation: int | None = None
    pcie_lanes: int = 16
    # To the host in one direction, if the link is faster than PCIe (NVLink-C2C).
    host_gb_per_second: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None  # this and fp32, without tensor cores, if there is no bf16
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    int8_tflops: float | None = None
    reached_tflops: float | None = None  # of large products in the training dtype, by others
    confidence: str
    source: str
    notes: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that drivers report for it, and those that people use."""
        return (self.name, *self.other_names)

    @property
    def memory_bytes(self) -> int:
        """Return what CUDA reports, or else 97% of the nominal size: the driver reserves some."""
        if self.memory_cuda_mib is not None:
            return self.memory_cuda_mib * 2**20
        return int(self.memory_nominal_gb * 2**30 * 0.97)

    @property
    def training_dtype(self) -> str:
        """The dtype that training computes in."""
        return "fp16" if self.bf16_tflops is None else "bf16"

    @property
    def datasheet(self) -> Datasheet:
        """The figures that profiles contain."""
        peaks = {
            f"{name}_flops_per_second": tera and tera * 1e12
            for name in ("bf16", "fp16", "fp32", "tf32", "fp8", "int8")
            for tera in (getattr(self, f"{name}_tflops"),)
        }
        reached = self.reached_tflops and self.reached_tflops * 1e12
        # GeForce cards accumulate in fp32 at half rate, which power does not limit: 17 desktop
        # cards reach .91 to 1.14 of their peak, 1.05 in the mean.
        if reached is None and "GeForce" in self.name:
            reached = peaks["bf16_flops_per_second"]
        lane = PCIE_BYTES_PER_LANE.get(self.pcie_generation or 0)
        link = None if self.host_gb_per_second is None else self.host_gb_per_second * 1e9
        return Datasheet(
            id=self.id,
            **peaks,
            **{f"reached_{self.training_dtype}_flops_per_second": reached},
            memory_bytes_per_second=self.memory_gb_per_second * 1e9,
            pcie_bytes_per_second=link or (None if lane is None else self.pcie_lanes * lane),
            power_watts=self.power_watts,
            confidence=self.confidence,
            source=self.source,
        )


@cache
def load_catalog() -> tuple[CatalogGpu, ...]:
    """Read every GPU of the catalog: GeForce, laptops, workstations, data centers."""
    with shipped_path("hardware.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        known = ({name: text for name, text in row.items() if text} for row in rows)
        return tuple(CatalogGpu.model_validate_strings(row, strict=False) for row in known)


def find_gpu(name: str, total_memory_bytes: int | None) -> CatalogGpu | None:
    """Find the card for a name that CUDA reports; none for siblings, MIG slices and other sizes."""
    gpus = {gpu.id: gpu for gpu in load_catalog()}
    called, _ = match_names(name, {id_: gpu.names for id_, gpu in gpus.items()}, SERIES)
    for gpu in map(gpus.__getitem__, called):
        size = total_memory_bytes or gpu.memory_bytes
        if abs(size / gpu.memory_bytes - 1) <= MEMORY_TOLERANCE:
            return gpu
    return None


def _names(gpu: CatalogGpu) -> tuple[str, ...]:
    names = (gpu.id, *gpu.names)
    sized = (f"{name} {gpu.memory_nominal_gb:g}{unit}" for name in names for unit in ("gb", "g"))
    mobile = (gpu.id.replace("laptop", word) for word in ("mobile", "m"))
    return (*names, *sized, *mobile)


def gpu_named(name: str) -> CatalogGpu:
    """Find the one GPU that `name` or a part of it identifies: `4080`, `RTX 4080`, `4080_super`.
    A name without more words, such as Ti, goes first; of two sizes the first is meant. Raises
    InvalidInput."""
    gpus = {gpu.id: gpu for gpu in load_catalog()}
    names = {id_: _names(gpu) for id_, gpu in gpus.items()}
    same, alike = match_names(name, names, SERIES)
    if len({gpus[id_].name for id_ in same}) == 1:
        same = same[:1]
    unasked = {word for word in VARIANTS if word not in name.lower()}
    found = same or [id_ for id_ in alike if unasked.isdisjoint(id_.split("-"))]
    if len(found) == 1:
        return gpus[found[0]]
    listing = "`autotune probe --list` shows the catalog"
    if found:
        what = f"{name!r} may be any of {', '.join(found)}"
        raise InvalidInput(what, hint=f"name one of them; {listing}")
    compact = re.sub(r"[\W_]", "", name.lower())
    for pattern, why in NOT_COVERED:
        if re.search(pattern, compact):
            raise InvalidInput(f"autotune does not plan for {name!r}: {why}", hint=listing)
    near = alike or [
        id_
        for short in get_close_matches(compact, map(_short, gpus), n=3, cutoff=MIN_LIKENESS)
        for id_ in gpus
        if _short(id_) == short
    ]
    what = f"no hardware called {name!r}: neither a catalog name nor a saved profile"
    other = f"another card is {', '.join(near)}; " if near else ""
    raise InvalidInput(what, hint=other + listing)


def _short(id_: str) -> str:
    return re.sub("|".join((r"\W", *SERIES)), "", id_)


def gpus_named(names: str | Sequence[str]) -> list[CatalogGpu]:
    """Return the GPUs of names, or of texts with several separated by commas, or of `all`."""
    given = [names] if isinstance(names, str) else names
    listed = [name.strip() for one in given for name in one.split(",") if name.strip()]
    if "all" in listed:
        return list(load_catalog())
    if not listed:
        raise InvalidInput("no GPU is named", hint="name some, e.g. 4090,5090, or all")
    return list({gpu.id: gpu for gpu in map(gpu_named, listed)}.values())


def profile_of_gpu(gpu: CatalogGpu) -> HardwareProfile:
    """Build a profile to plan with: on a Linux host of 64 GiB, with this environment's packages."""
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
    profile = HardwareProfile(
        origin="catalog",
        device=device,
        host=host,
        versions=versions,
        datasheet=gpu.datasheet,
        notes=(
            f"from the catalog, not measured; figures: {gpu.confidence} confidence",
            f"assumed: {memory / 2**30:.0f} GiB of system RAM, CUDA {versions.cuda_runtime}, "
            "driver 580, a C compiler, no display, and this environment's packages",
            *capabilities.without_bf16(device),
            *((gpu.notes,) if gpu.notes else ()),
        ),
    )
    return capabilities.with_capabilities(profile)


def with_host_memory(profile: HardwareProfile, num_bytes: int) -> HardwareProfile:
    """Return a catalog's profile in a host with so much memory, of which a tenth is in use."""
    is_shared = profile.device.memory_kind == "integrated"
    if is_shared or profile.origin != "catalog":
        why = "it is this device's own memory" if is_shared else "it was measured"
        what = f"the system RAM cannot be chosen: {why}"
        raise InvalidInput(what, hint="leave --host-memory out")
    if not num_bytes:
        raise InvalidInput("a computer has some system RAM", hint="such as --host-memory 64GiB")
    host = profile.host.changed(memory_bytes=num_bytes, available_memory_bytes=int(0.9 * num_bytes))
    sizes = (profile.host.memory_bytes, num_bytes)
    old, new = (f"{size / 2**30:.0f} GiB of system RAM" for size in sizes)
    return profile.changed(host=host, notes=tuple(note.replace(old, new) for note in profile.notes))


def with_assumed_packages(profile: HardwareProfile, names: Collection[str]) -> HardwareProfile:
    """Return a catalog's profile with these packages of attention backends, which it can run."""
    if profile.origin != "catalog":
        raise InvalidInput("what is installed on this machine is known", hint="leave --assume out")
    names = (names,) if isinstance(names, str) else names
    trainable = [each for each in ATTENTION_BACKENDS.values() if not each.why_not]
    backends = [each for each in trainable if each.needs.library]
    told = profile
    for name in names:
        own = [each.needs for each in backends if each.needs.library == name.replace("-", "_")]
        if not own:
            known = sorted({str(each.needs.library).replace("_", "-") for each in backends})
            what = f"no attention backend that trains needs a package {name!r}"
            raise InvalidInput(what, hint=f"these can be assumed: {', '.join(known)}")
        needs = max(own, key=lambda needs: Version(needs.min_version))
        library = str(needs.library)
        if not told.versions.has(library, needs.min_version):
            told = told.changed(versions=told.versions.changed(**{library: needs.min_version}))
        if reason := capabilities.unmet(needs, told):
            hint = "leave --assume out, or plan for another card"
            raise InvalidInput(f"{name} does not run on {profile.device.name}: {reason}", hint=hint)
    note = f"assumed: {', '.join(names)} installed, and its attention as fast as is published"
    told = told.changed(assumed=tuple(names), notes=(*told.notes, note))
    return capabilities.with_capabilities(told)


def _device(gpu: CatalogGpu) -> Device:
    total = gpu.memory_bytes
    major, minor = gpu.compute_capability.split(".")
    return capabilities.device_with_budget(
        gpu.memory_kind,
        kind="cuda",
        index=0,
        name=gpu.name,
        compute_capability=(int(major), int(minor)),
        sm_count=gpu.sm_count,
        l2_bytes=None if gpu.l2_mib is None else int(gpu.l2_mib * 2**20),
        memory_kind_reason=f"from the catalog: {gpu.memory_kind}, {gpu.memory}",
        total_memory_bytes=total,
        free_memory_bytes=int(0.9 * total) if gpu.memory_kind == "integrated" else total,
        pcie_generation=gpu.pcie_generation,
        power_limit_watts=gpu.power_watts,
        default_power_limit_watts=gpu.power_watts,
    )


def _assumed_versions(device: Device) -> Versions:
    old = device.compute_capability is not None and device.compute_capability < capabilities.CUDA_13
    found = {"cuda_runtime": OLD_CARDS_CUDA} if old else {}
    for field, package in facts.PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[field] = version.partition("+")[0]  # without the local part, which names this build
    return Versions(python=platform.python_version(), **(ASSUMED_VERSIONS | found))


PRICE_HINT = "write `per_hour:`, and below it lines such as `rtx 4090: 0.45`"


class PriceList(Frozen):
    """The price of an hour of each GPU, by its name in the catalog."""

    currency: str = Field(default="", max_length=8)
    date: str = Field(default="", max_length=32)  # when the prices were looked up
    per_hour: dict[str, Annotated[float, Field(ge=0, le=1e6)]]


class _Loader(BoundedLoader):
    """A plan's loader that reads keys such as 4090 as the text that they stand for."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value:
            key.tag = TEXT_TAG if isinstance(key, yaml.ScalarNode) else key.tag
        return super().construct_mapping(node, deep)


def read_prices(prices: Mapping[str, float] | str | Path | None) -> PriceList:
    """Read prices from a file or a mapping; names may be a part of those in the catalog."""
    if prices is None or isinstance(prices, Mapping):
        source = "the prices"
        try:
            listed = PriceList(per_hour=dict(prices or {}))
        except ValidationError as error:
            where, why = first_problem(error)
            raise InvalidInput(f"{source}: {where}: {why}", hint=PRICE_HINT) from error
    else:
        source = str(prices)
        listed = read_listing(Path(prices), PriceList, "prices", PRICE_HINT, _Loader)
    by_gpu: dict[str, float] = {}
    for name, price in listed.per_hour.items():
        try:
            gpu = gpu_named(name).id
        except InvalidInput as error:
            raise InvalidInput(f"{source}: {error.message}", hint=error.hint) from error
        if gpu in by_gpu:
            message = f"{source}: {name!r} is a second price of {gpu}"
            raise InvalidInput(message, hint="leave one of them out")
        by_gpu[gpu] = price
    return listed.changed(per_hour=by_gpu)
