"""Facts from raw values: the first valid one of several sources, or why there is none."""

import platform
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field, TypeAdapter

from autotune.errors import AutotuneError, InvalidInput
from autotune.machine.capabilities import classify_memory, compute_budget, device_with_budget
from autotune.machine.sources import System, Unavailable
from autotune.plan.hardware import Device, Host, Link, MemoryKind, OtherGpu, Versions

T = TypeVar("T")
# Name of each fact: its type, and where it is read, as `source:query`, the best source first.
Facts = Mapping[str, tuple[TypeAdapter[Any], *tuple[str, ...]]]

SOURCE_NAMES = {
    "torch": "CUDA runtime",
    "nvml": "NVML",
    "driver": "CUDA driver API",
    "os": "operating system",
    "packages": "installed packages",
    "environment": "environment",
}


def integer(minimum: int, maximum: int) -> TypeAdapter[int]:
    """Validate an integer within [minimum, maximum]."""
    return TypeAdapter(Annotated[int, Field(strict=True, ge=minimum, le=maximum)])


# Bytes; more than a petabyte is nonsense. What is free may be 0.
SIZE, FREE = integer(1, 2**50), integer(0, 2**50)
# Printable and not empty.
PRINTABLE = pydantic.StringConstraints(
    strict=True, strip_whitespace=True, pattern=r"^(?: |[^\p{C}\p{Z}])+$"
)
TEXT: TypeAdapter[str] = TypeAdapter(Annotated[str, PRINTABLE])
FLAG: TypeAdapter[Any] = TypeAdapter(
    Annotated[pydantic.StrictBool | Literal[0, 1], pydantic.AfterValidator(bool)]
)


class Reader:
    """Reads facts about one device; `absent` tells why a fact is unknown."""

    def __init__(self, system: System, index: int = 0) -> None:
        self.system, self.index = system, index
        self.absent: dict[str, str] = {}

    def facts(self, owner: str, wanted: Facts) -> dict[str, Any]:
        """Read the facts of `owner` (`device`, `host` ...) that some source knows, by name."""
        found = {
            name: self.fact(f"{owner}.{name}", kind, *queries)
            for name, (kind, *queries) in wanted.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def fact(self, fact: str, kind: TypeAdapter[T], *queries: str) -> T | None:
        """Return the first valid value that the `queries` give, or None and record why."""
        reasons = []
        for query in queries:
            source, _, name = query.partition(":")
            raw: object = None
            try:
                raw = self.system.query(source, name, self.index)
                value = kind.validate_python(raw)
            except Unavailable as error:
                reasons.append(f"{SOURCE_NAMES[source]}: {error}")
            except pydantic.ValidationError:
                reasons.append(f"{SOURCE_NAMES[source]}: reports {raw!r:.60}, which is invalid")
            else:
                return value
        self.absent[fact] = "; ".join(reasons)
        return None

    def raw(self, query: str) -> object:
        """Return the value without validation, or None: for what is no fact of the profile."""
        source, _, name = query.partition(":")
        try:
            return self.system.query(source, name, self.index)
        except Unavailable:
            return None

    def read_host(self) -> Host:
        """Read the computer around the device. Raises AutotuneError if its memory is unknown."""
        facts: dict[str, Any] = {"cpu": "unknown CPU", "logical_cores": 1, "system": "unknown"}
        facts |= self.facts("host", HOST)
        limit, wsl = facts.pop("container_free_bytes", None), facts.pop("wsl", False)
        for name in ("memory_bytes", "available_memory_bytes"):
            if name not in facts:
                what = f"the system's RAM is unknown ({self.absent[f'host.{name}']})"
                raise AutotuneError(what, hint="check /proc/meminfo and psutil")
        free = min(facts["available_memory_bytes"], facts["memory_bytes"])
        facts["available_memory_bytes"] = free if limit is None else min(free, limit)
        by_system = {"Windows": "windows", "Darwin": "macos"}
        model: Any = "wsl" if wsl else by_system.get(facts["system"].partition(" ")[0], "linux")
        return Host(memory_model=model, **facts)

    def read_versions(self) -> Versions:
        """Read the versions of what decides how a step runs."""
        known = {"python": platform.python_version()} | self.facts("versions", VERSIONS)
        return Versions(**known)


NO_PACKAGES = frozenset({"python", "cuda_runtime", "cuda_driver", "driver", "cudnn"})
# Field of `Versions`: name of the distribution.
PACKAGES: Mapping[str, str] = {
    name: name.replace("_", "-") for name in Versions.model_fields if name not in NO_PACKAGES
}

HOST: Facts = {
    "memory_bytes": (SIZE, "os:memory_bytes"),
    "available_memory_bytes": (FREE, "os:available_bytes"),
    "container_free_bytes": (FREE, "os:container_free_bytes"),
    "cpu": (TEXT, "os:cpu"),
    "physical_cores": (integer(1, 4096), "os:physical_cores"),
    "logical_cores": (integer(1, 8192), "os:logical_cores"),
    "swap_bytes": (FREE, "os:swap_bytes"),
    "system": (TEXT, "os:system"),
    "wsl": (FLAG, "os:wsl"),
    "container": (TEXT, "os:container"),
    "compiler": (TEXT, "os:compiler"),
    "gpu_direct_storage": (FLAG, "os:gpu_direct_storage"),
}
VERSIONS: Facts = {
    **{field: (TEXT, f"packages:{package}") for field, package in PACKAGES.items()},
    "python": (TEXT, "os:python"),
    "cuda_runtime": (TEXT, "packages:torch_cuda", "torch:cuda"),
    "cuda_driver": (TEXT, "nvml:cuda_driver", "driver:cuda_driver"),
    "driver": (TEXT, "nvml:driver"),
    "cudnn": (TEXT, "torch:cudnn"),
}
MEMORY_SIGNALS: Facts = {
    "integrated": (FLAG, "driver:integrated", "torch:integrated"),
    "host_page_tables": (FLAG, "driver:host_page_tables"),
}
Natural = Annotated[int, Field(strict=True, ge=0)]
LANES = integer(1, 64)
WATTS: TypeAdapter[float] = TypeAdapter(
    Annotated[float, Field(strict=True, gt=0, le=1e5, allow_inf_nan=False)]
)
CUDA: Facts = {
    "total_memory_bytes": (SIZE, "torch:total_bytes", "nvml:total_bytes"),
    "drives_display": (FLAG, "nvml:display_active"),
    "name": (TEXT, "torch:name", "nvml:name"),
    "compute_capability": (
        TypeAdapter(tuple[Annotated[Natural, Field(ge=1)], Annotated[Natural, Field(lt=10)]]),
        "torch:capability",
        "nvml:capability",
    ),
    "sm_count": (integer(1, 4096), "torch:sm_count"),
    "l2_bytes": (SIZE, "torch:l2_bytes"),
    "pcie_generation": (integer(1, 16), "nvml:pcie_generation"),
    "pcie_width": (LANES, "nvml:pcie_width"),
    "pcie_max_width": (LANES, "nvml:pcie_max_width"),
    "power_limit_watts": (WATTS, "nvml:power_limit_watts"),
    "default_power_limit_watts": (WATTS, "nvml:default_power_limit_watts"),
    "mig": (FLAG, "nvml:mig"),
    "other_process_bytes": (FREE, "nvml:other_process_bytes"),
    "links": (TypeAdapter(tuple[tuple[Natural, str], ...]), "nvml:links"),
}


def read_device(reader: Reader, host: Host) -> Device:
    """Read the device that torch would train on, or raise InvalidInput for its index."""
    kind, count = reader.raw("torch:kind"), 1
    kind = kind if kind in ("cuda", "mps") else "cpu"
    if kind == "cuda":
        count = reader.fact("device.count", integer(1, 1024), "torch:count") or 1
    if reader.index >= count:
        what = f"there is no {kind} device {reader.index}: {count} visible"
        raise InvalidInput(what, hint="indices start at 0; see `autotune probe`")
    if kind == "cuda":
        return _cuda_device(reader, count)
    facts = {"kind": kind, "index": 0, "free_memory_bytes": host.available_memory_bytes}
    if kind == "cpu":
        return device_with_budget(
            "host",
            name=host.cpu,
            memory_kind_reason="a CPU trains in the system's RAM",
            total_memory_bytes=host.memory_bytes,
            **facts,
        )
    return device_with_budget(
        "integrated",
        name=reader.fact("device.name", TEXT, "os:cpu") or "Apple GPU",
        memory_kind_reason="Apple GPUs share the system's RAM",
        total_memory_bytes=reader.fact(
            "device.total_memory_bytes", SIZE, "torch:recommended_bytes"
        ),
        **facts,
    )


def _cuda_device(reader: Reader, count: int) -> Device:
    signals = reader.facts("device", MEMORY_SIGNALS)
    override = reader.raw("environment:AUTOTUNE_MEMORY_KIND")
    kind, why = classify_memory(
        signals.get("integrated"),
        signals.get("host_page_tables"),
        override if isinstance(override, str) else None,
    )
    # NVML before torch: it opens no context, so free memory does not include ours. If memory is
    # shared, the host's counts, and not a container's part of it: a limit there does not contain
    # CUDA's allocations.
    own = ("nvml:free_bytes", "torch:free_bytes")
    queries = ("os:available_bytes",) if kind == "integrated" else own
    free = reader.fact("device.free_memory_bytes", FREE, *queries)
    facts = {"name": "unknown GPU"} | reader.facts("device", CUDA)
    links, total = facts.get("links", ()), facts.get("total_memory_bytes")
    facts["links"] = tuple(Link(peer_index=peer, path=path) for peer, path in links)
    if total is not None and free is not None:
        free = min(free, total)
    facts |= {"index": reader.index, "count": count, "others": _other_gpus(reader, count, kind)}
    return device_with_budget(
        kind, kind="cuda", memory_kind_reason=why, free_memory_bytes=free, **facts
    )


def _other_gpus(reader: Reader, count: int, kind: MemoryKind) -> tuple[OtherGpu, ...]:
    # NVML alone tells what is free: torch would open a context there
    found = []
    wanted = {name: CUDA[name] for name in ("name", "total_memory_bytes", "drives_display")}
    for index in range(count):
        beside = Reader(reader.system, index)
        facts = {"name": "unknown GPU"} | beside.facts("other", wanted)
        if index == reader.index or "total_memory_bytes" not in facts:
            continue
        free = beside.fact("other.free", FREE, "nvml:free_bytes")
        drives_display = facts.pop("drives_display", None)
        budget, _ = compute_budget(kind, facts["total_memory_bytes"], free, drives_display)
        found.append(OtherGpu(index=index, budget_bytes=budget, **facts))
    return tuple(found)
