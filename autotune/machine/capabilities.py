"""The kind of memory of a device, how much a run may use, and what the machine can do. Pure.

Compute capability does not tell: H100 (9.0) has its own memory, Orin (8.7) has not. Two CUDA
attributes decide, 18 (`integrated`) and 100 (`pageableMemoryAccessUsesHostPageTables`, ATS): they
are 1, 1 on GB10 and Thor, 1, 0 on Orin, 0, 1 on GH200 and GB200, and 0, 0 on every other card.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import AutotuneError, InvalidInput
from autotune.knobs import attention, formats
from autotune.knobs.knob import Requirements
from autotune.plan import hardware

GIB = 2**30
OVERRIDES: tuple[hardware.MemoryKind, ...] = ("discrete", "integrated", "coherent")
DISPLAY_RESERVE_BYTES = GIB  # a desktop takes this much more as windows open
MIN_MARGIN_BYTES = 256 * 2**20
MAX_SHARED_RESERVE_BYTES = 16 * GIB
MAX_HOST_RESERVE_BYTES = 4 * GIB


def classify_memory(
    integrated: bool | None, host_page_tables: bool | None, override: str | None
) -> tuple[hardware.MemoryKind, str]:
    """Return the kind and why, from the two attributes of a CUDA device (None: unknown). Raises
    InvalidInput if `override` (AUTOTUNE_MEMORY_KIND) is none of a GPU's kinds of memory."""
    if override:
        for kind in OVERRIDES:
            if override == kind:
                return kind, f"set by AUTOTUNE_MEMORY_KIND={override}; measured signals ignored"
        hint = f"use one of: {', '.join(OVERRIDES)}; or unset it"
        raise InvalidInput(f"AUTOTUNE_MEMORY_KIND is {override!r}", hint=hint)
    if integrated is None and host_page_tables is None:
        return "discrete", "neither signal is known: assumed to be a card with its own memory"
    values = ["unknown" if each is None else int(each) for each in (integrated, host_page_tables)]
    signals = "integrated {}, host page tables {}".format(*values)
    if integrated:
        return "integrated", f"{signals}: shares the system's RAM"
    if host_page_tables and integrated is None:
        return "integrated", f"{signals}: assumed to share the system's RAM, to be safe"
    if host_page_tables:
        return "coherent", f"{signals}: its own memory, with access to the system's RAM"
    return "discrete", f"{signals}: its own memory"


def compute_budget(
    kind: hardware.MemoryKind,
    total: int | None,
    free: int | None,
    drives_display: bool | None,
    reserve: int | None = None,
) -> tuple[int, str]:
    """Return how many bytes of a device a run may use, and why. `reserve` replaces the default one.

    `free` is what the device has free, or MemAvailable if it shares the host's memory: what CUDA
    calls free there ignores page cache that the kernel would give back. The reserve is an eighth of
    shared memory (16 GiB at most, because an over-allocation hangs the machine), an eighth of the
    host's (4 GiB at most) when the CPU trains, and 1 GiB on a card that drives a display. Cards
    also keep a margin of 2%, at least 256 MiB, for fragmentation.

    Raises AutotuneError if neither free nor total memory is known.
    """
    if free is None and total is None:
        what = "neither the CUDA runtime nor NVML reports how much memory the device has"
        hint = "see `autotune doctor`; a GPU of the catalog can be planned for with --hardware"
        raise AutotuneError(what, hint=hint)
    available = min(size for size in (free, total) if size is not None)
    whole = total if total is not None else available
    free_text = "free" if free is not None else "in total (what is free is unknown)"
    why = f"{_gib(available)} {free_text}"
    margin = 0
    if not hardware.shares_host_memory(kind):
        margin = max(MIN_MARGIN_BYTES, whole // 50)
        why += f", less a margin of {_gib(margin)}"
    reserved = default_reserve_bytes(kind, whole, drives_display) if reserve is None else reserve
    if reserved:
        for_display = " for the display" if drives_display and reserve is None else ""
        why += f", less a reserve of {_gib(reserved)}{for_display}"
    return max(0, available - margin - reserved), why


def device_with_budget(memory_kind: hardware.MemoryKind, **facts: Any) -> hardware.Device:
    """Return the device with these facts, fields of `Device`, and the budget that they give."""
    names = ("total_memory_bytes", "free_memory_bytes", "drives_display")
    budget_bytes, why = compute_budget(memory_kind, *map(facts.get, names))
    return hardware.Device(
        memory_kind=memory_kind, budget_bytes=budget_bytes, budget_reason=why, **facts
    )


def limit_device(
    device: hardware.Device, max_bytes: int | None = None, reserve_bytes: int | None = None
) -> hardware.Device:
    """Return the device with the budget that a user's limits leave: `reserve_bytes` replace the
    default reserve."""
    kind, total, free = device.memory_kind, device.total_memory_bytes, device.free_memory_bytes
    num_bytes, why = device.budget_bytes, device.budget_reason
    if reserve_bytes is not None:
        num_bytes, why = compute_budget(kind, total, free, device.drives_display, reserve_bytes)
    if max_bytes is not None and max_bytes < num_bytes:
        num_bytes, why = max_bytes, f"{_gib(max_bytes)} as asked"
    elif reserve_bytes is None:
        return device
    return device.changed(budget_bytes=num_bytes, budget_reason=why, budget_set_by_user=True)


def default_reserve_bytes(
    kind: hardware.MemoryKind, total_bytes: int, drives_display: bool | None = None
) -> int:
    """Return how much of a memory is left to other processes; see `compute_budget`."""
    if kind == "integrated":
        return min(MAX_SHARED_RESERVE_BYTES, total_bytes // 8)
    if kind == "host":
        return min(MAX_HOST_RESERVE_BYTES, total_bytes // 8)
    return DISPLAY_RESERVE_BYTES if drives_display else 0


def host_floor_bytes(kind: hardware.MemoryKind, total_bytes: int, available_bytes: int) -> int:
    """Return how much host memory a trial must leave: half the reserve, at most a quarter."""
    return min(default_reserve_bytes(kind, total_bytes) // 2, available_bytes // 4)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def unmet(needs: Requirements, machine: hardware.HardwareProfile) -> str | None:
    """Return the first requirement that the machine does not meet, in words."""
    device = machine.device
    if needs.device_kinds and device.kind not in needs.device_kinds:
        return f"needs {' or '.join(needs.device_kinds)}, this is {device.kind}"
    own, minimum, major = device.compute_capability, needs.compute_capability, needs.only_major
    if device.kind == "cuda":
        asks, there = "hardware: needs compute capability", f"this is {_dotted(own)}"
        if own is None or own < minimum:
            return f"{asks} {_dotted(minimum)}, {there}"
        if major not in (None, own[0]):
            return f"{asks} {major}.x, {there}"
    if device.kind in needs.compiles_on:
        missing = _missing_compiler(machine) or _missing_triton(machine)
        if missing:
            return missing
    return _missing_library(needs, machine)


def _missing_library(needs: Requirements, machine: hardware.HardwareProfile) -> str | None:
    device, versions, library = machine.device, machine.versions, needs.library
    if library is None:
        return None
    minimum = (needs.min_version_on_cpu if device.kind == "cpu" else None) or needs.min_version
    if versions.has(library, minimum):
        return None
    if (version := getattr(versions, library)) is None:
        return f"package: {library} is not installed"
    return f"package: needs {library} {minimum}, this is {version}"


def _missing_compiler(machine: hardware.HardwareProfile) -> str | None:
    return None if machine.host.compiler else "no C compiler on PATH: install gcc or clang"


def _missing_triton(machine: hardware.HardwareProfile) -> str | None:
    """torch.compile generates GPU code by triton."""
    missing = machine.device.kind == "cuda" and machine.versions.triton is None
    return "package: triton is not installed" if missing else None


def _poor_fp16(machine: hardware.HardwareProfile) -> str | None:
    if has_faulty_fp16(machine.device):
        return "known bug: fp16 gives NaN on GTX 16 cards (pytorch/pytorch#58123)"
    is_cpu = machine.device.kind == "cpu"
    return "hardware: fp16 products are very slow on a CPU" if is_cpu else None


def has_faulty_fp16(device: hardware.Device) -> bool:
    """Tell if fp16 gives NaN on the card. These cards have no tensor cores either."""
    return "GTX 16" in device.name


def _missing_gpu_direct_storage(machine: hardware.HardwareProfile) -> str | None:
    if machine.host.memory_model not in ("linux", "wsl"):
        return f"needs Linux, this is {machine.host.system}"
    if machine.host.gpu_direct_storage:
        return None
    return "/dev/nvidia-fs0 does not exist: the nvidia-fs module is not loaded"


# Lowest compute capability with bf16 arithmetic, with tensor cores (fp16's), and for CUDA 13.
BF16, FP16, CUDA_13 = (8, 0), (7, 0), (7, 5)
NO_BF16 = "this GPU has no bf16"  # so the note about that begins


@dataclass(frozen=True)
class Rule:
    """A feature, available if its needs are met and there is no obstacle; `why` is shown then."""

    name: str
    why: str
    needs: Requirements = field(default_factory=Requirements)
    obstacles: tuple[Callable[[hardware.HardwareProfile], str | None], ...] = ()


RULES = (
    Rule("precision.fp32", "everywhere"),
    Rule("precision.bf16", "bf16 arithmetic", Requirements(("cuda", "cpu", "mps"), BF16)),
    Rule("precision.fp16", "fp16 arithmetic", Requirements(compute_capability=FP16), (_poor_fp16,)),
    Rule("precision.tf32", "tensor cores round fp32 inputs", Requirements(("cuda",), (8, 0))),
    Rule("precision.fp8", "fp8 matrix units", Requirements(("cuda",), (8, 9))),
    Rule(
        "compile",
        "a compiler and what it needs are there",
        Requirements(("cuda", "cpu"), (7, 0)),
        (_missing_compiler, _missing_triton),
    ),
    Rule(
        "gds", "reads go from disk to GPU", Requirements(("cuda",)), (_missing_gpu_direct_storage,)
    ),
)


def with_capabilities(machine: hardware.HardwareProfile) -> hardware.HardwareProfile:
    """Return the profile with every capability, available or not, in the tables' order."""
    found = []
    for rule in RULES:
        obstacles = (obstacle(machine) for obstacle in rule.obstacles)
        why_not = next(filter(None, (unmet(rule.needs, machine), *obstacles)), None)
        found.append((rule.name, rule.why, why_not))
    for backend in attention.ATTENTION_BACKENDS.values():
        why_not = backend.why_not or unmet(backend.needs, machine)
        found.append((backend.capability, backend.summary, why_not))
    for each in formats.WEIGHT_FORMATS.values():
        found.append((each.capability, each.summary, unmet(each.needs, machine)))
    capabilities = tuple(
        hardware.Capability(name=name, available=why_not is None, reason=why_not or why)
        for name, why, why_not in found
    )
    return machine.changed(capabilities=capabilities)


def lacks_code(versions: hardware.Versions, own: tuple[int, int] | None) -> bool:
    """Tell if a torch built with this CUDA has no code for a card of compute capability `own`:
    Thor's is in 13.0 and newer, other Blackwell cards' in 12.8."""
    needed = "13.0" if own is not None and own[0] == 11 else "12.8"
    return own is not None and own >= (10, 0) and not versions.has("cuda_runtime", needed)


def without_bf16(device: hardware.Device) -> tuple[str, ...]:
    """Return the note on a card that cannot train in bf16, if it is one."""
    own = device.compute_capability
    if device.kind != "cuda" or own is None or own >= BF16:
        return ()
    why = f"compute capability {_dotted(own)}, bf16 needs {_dotted(BF16)}"
    trains = "in fp16 with a loss scale; models that overflow it in fp32, without its tensor cores"
    if own >= (7, 5):
        trains += " (which compute the int8 products of --quality compact)"
    if own < FP16 or has_faulty_fp16(device):
        trains = "in fp32"
    return (f"{NO_BF16} ({why}): it trains {trains}",)


def _dotted(own: tuple[int, int] | None) -> str:
    return "unknown" if own is None else f"{own[0]}.{own[1]}"
