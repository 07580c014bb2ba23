"""What the doctor examines: the facts of a machine that can be read without torch and without a
CUDA context."""

from collections.abc import Iterator
from typing import Literal, get_args

from autotune.machine.capabilities import CUDA_13
from autotune.machine.catalog import find_gpu
from autotune.machine.facts import (
    CUDA,
    FREE,
    MEMORY_SIGNALS,
    TEXT,
    Facts,
    Reader,
    integer,
    read_host,
    read_versions,
)
from autotune.machine.sources import RealSystem, System
from autotune.plan.base import Frozen
from autotune.plan.hardware import Host, Versions


class Gpu(Frozen):
    """The facts of one GPU; fields as in `Device`."""

    index: int
    name: str = "GPU"
    compute_capability: tuple[int, int] | None = None
    total_memory_bytes: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    drives_display: bool | None = None
    other_process_bytes: int | None = None
    integrated: bool | None = None


GPU: Facts = {
    name: (kind, *(query for query in queries if not query.startswith("torch:")))
    for name, (kind, *queries) in {**CUDA, **MEMORY_SIGNALS}.items()
    if name in Gpu.model_fields
}
OTHER: Facts = {
    "rocm": (TEXT, "packages:torch_hip"),
    "attention": (TEXT, "environment:DIFFUSERS_ATTN_BACKEND"),
    "disk_free_bytes": (FREE, "os:disk_free_bytes"),
    "torchvision_needs": (TEXT, "packages:torchvision_needs"),
    "nvidia_cards": (integer(0, 1024), "os:nvidia_cards"),
}


class DoctorFacts(Frozen):
    """Everything that the checks examine."""

    host: Host
    versions: Versions
    gpus: tuple[Gpu, ...]
    rocm: str | None = None
    """HIP version that torch was built with."""
    visible_devices: str | None
    attention: str | None = None
    """Attention backend chosen in the environment (DIFFUSERS_ATTN_BACKEND)."""
    disk_free_bytes: int | None = None
    disk_needed_bytes: int
    torchvision_needs: str | None = None
    """The torch that an installed torchvision was built for, e.g. `torch==2.12.0`."""
    nvidia_cards: int | None = None
    """NVIDIA cards on the bus, with or without a driver."""
    nvml_absent: str | None
    """Why NVML is unavailable; None if it is available."""


def read_doctor_facts(system: System, disk_needed_bytes: int) -> DoctorFacts:
    """Read what the checks need, from every source but torch.

    Raises:
        AutotuneError: the operating system does not report how much memory there is.
    """
    reader = Reader(system)
    by_nvml = reader.fact("nvml", integer(0, 64), "nvml:count")
    count = reader.fact("gpus", integer(0, 64), "driver:count") if by_nvml is None else by_nvml
    visible = reader.raw("environment:CUDA_VISIBLE_DEVICES")
    return DoctorFacts(
        host=read_host(reader),
        versions=read_versions(reader),
        gpus=tuple(
            Gpu(index=index, **Reader(system, index).facts("device", GPU))
            for index in range(count or 0)
        ),
        visible_devices=visible if isinstance(visible, str) else None,
        disk_needed_bytes=disk_needed_bytes,
        nvml_absent=reader.absent.get("nvml"),
        **reader.facts("machine", OTHER),
    )


GIB = 2**30
MIN_HOST_BYTES = 32 * GIB
"""Streaming a large text encoder through the host needs about 20 GiB, the rest of the machine a
few more."""
BUSY_BYTES = GIB
"""Other processes that hold less are a desktop, not a run."""
MIN_DRIVERS = {"13": "580", "12": "525", "11": "450.80.02"}
"""CUDA major version: the oldest driver that runs it (minor-version compatibility, CUDA release
notes)."""

MIN_VERSIONS = {"diffusers": "0.42", "transformers": "5.15", "peft": "0.20", "accelerate": "1.10"}
"""Oldest versions that work. With peft 0.18 no layer is adapted if torchao is 0.18 or newer,
with 0.19 none whose weights torchao quantized."""
DEFAULT_DISK_BYTES = 90 * GIB
"""Qwen-Image in bf16 (58 GB on the hub), its caches, checkpoints and room to write a shard
twice."""

NO_SPILL = (
    "in the NVIDIA control panel set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback'"
)
"""What makes a driver on Windows and WSL fail instead of moving a GPU's memory to the host."""

Severity = Literal["blocks", "hurts", "note"]
"""Worst first."""


class Finding(Frozen):
    """One thing that will hurt, and what to do about it.

    Example:
        >>> [finding.fix for finding in autotune.doctor() if finding.severity == "blocks"]
    """

    severity: Severity
    name: str
    """Stable, for scripts, e.g. `driver-too-old`."""
    what: str
    fix: str


def doctor() -> tuple[Finding, ...]:
    """What on this machine will hurt, worst first, each with the fix. Needs no torch and no GPU
    context.

    Raises:
        AutotuneError: the operating system does not report how much memory there is.

    Example:
        >>> for finding in autotune.doctor():
        ...     print(finding.severity, finding.what)
    """
    return findings(read_doctor_facts(RealSystem(torch=False), DEFAULT_DISK_BYTES))


def findings(facts: DoctorFacts) -> tuple[Finding, ...]:
    """All findings, worst first; equal ones in the order of the checks."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: get_args(Severity).index(finding.severity)))


def torch_fix(versions: Versions, gpus: tuple[Gpu, ...]) -> str:
    """How to install a torch (>= 2.11) that runs here. Builds of 2.13: cu126, cu129, cu130,
    cu132, rocm and cpu."""
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    outdated = versions.driver is not None and not versions.has(
        "driver", MIN_DRIVERS["12"]
    )  # it runs none of them
    first = "update the driver to 580 or newer, then " if outdated else ""
    build = "cu129" if any(own >= (10, 0) for own in capabilities) else "cu126"
    if versions.driver is None and not gpus:
        build = "cpu"
    elif (outdated or versions.has("driver", MIN_DRIVERS["13"])) and not any(
        map(_needs_cuda_12, gpus)
    ):
        build = "cu130"
    return (
        f"{first}install the {build} build of torch 2.11 or newer (pytorch.org, 'Get started', "
        "'Compute platform')"
    )


def check_torch(facts: DoctorFacts) -> Iterator[Finding]:
    """Torch is installed, is built for NVIDIA, and the driver can run it."""
    versions, cuda = facts.versions, facts.versions.cuda_runtime
    get = torch_fix(versions, facts.gpus)
    if versions.torch is None:
        yield Finding(severity="blocks", name="no-torch", what="torch is not installed", fix=get)
    elif facts.rocm is not None:
        what = (
            f"torch {versions.torch} is a ROCm build: AMD GPUs are not supported here, only "
            "the "
            "CPU is used"
        )
        yield Finding(severity="blocks", name="rocm-torch", what=what, fix=get)
    elif cuda is None and facts.gpus:
        what = f"torch {versions.torch} is built without CUDA, so {facts.gpus[0].name} is not used"
        yield Finding(severity="blocks", name="cpu-only-torch", what=what, fix=get)
    elif cuda is not None and versions.driver is not None:
        minimum = MIN_DRIVERS.get(cuda.split(".")[0])
        if minimum is not None and not versions.has("driver", minimum):
            too_old = (
                f"driver {versions.driver} is too old for torch {versions.torch} (CUDA {cuda})"
            )
            what = f"{too_old}: needs {minimum} or newer"
            fix = get if get.startswith("update") else f"update the driver; or {get}"
            yield Finding(severity="blocks", name="driver-too-old", what=what, fix=fix)
        elif cuda.startswith("12.") and not any(map(_needs_cuda_12, facts.gpus)):
            what = (
                f"torch {versions.torch} is built with CUDA {cuda}: works, but CUDA 12 builds "
                "are "
                "on their way out"
            )
            yield Finding(
                severity="note",
                name="cuda-12",
                what=what,
                fix="driver 580 or newer runs CUDA 13 builds",
            )
    if versions.torch is not None and not versions.has("torch", "2.11"):
        what = f"torch {versions.torch} is older than autotune is tested with"
        yield Finding(severity="hurts", name="old-torch", what=what, fix=get)


def _needs_cuda_12(gpu: Gpu) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability < CUDA_13


def check_old_card(facts: DoctorFacts) -> Iterator[Finding]:
    """CUDA 13 dropped everything before 7.5."""
    cuda13 = facts.versions.has("cuda_runtime", "13.0")
    for gpu in facts.gpus:
        if cuda13 and _needs_cuda_12(gpu):
            what = "{} has compute capability {}.{}; CUDA 13 needs 7.5".format(
                gpu.name, *gpu.compute_capability or ()
            )
            fix = "install the cu126 build of torch"
            yield Finding(severity="blocks", name="card-too-old", what=what, fix=fix)


def check_driver(facts: DoctorFacts) -> Iterator[Finding]:
    """A card needs a driver, and without NVML many checks find nothing."""
    if facts.nvidia_cards and not facts.gpus:
        what = f"{facts.nvidia_cards} NVIDIA card(s) on the bus, and no driver responds"
        fix = (
            "install NVIDIA's driver 580 or newer; in a container, pass the GPUs through "
            "(--gpus "
            "all)"
        )
        yield Finding(severity="blocks", name="no-driver", what=what, fix=fix)
    if facts.nvml_absent and facts.gpus:
        fix = (
            "install the driver's management library (libnvidia-ml.so.1), or give it to the "
            "container"
        )
        yield Finding(severity="note", name="no-nvml", what=facts.nvml_absent, fix=fix)


def check_visible_devices(facts: DoctorFacts) -> Iterator[Finding]:
    """CUDA stops at the first entry that is no device; without NVML, the GPUs that it hides are
    not counted."""
    value = facts.visible_devices
    if value is None:
        return
    entries = [entry.strip() for entry in value.split(",")]
    count = len(facts.gpus) if facts.nvml_absent is None and facts.gpus else None
    wrong = next((entry for entry in entries if not _names_device(entry, count)), None)
    if wrong is not None:
        hidden = "every GPU" if wrong == entries[0] else f"every GPU after {wrong!r}"
        what = (
            f"CUDA_VISIBLE_DEVICES={value!r} hides {hidden}: CUDA stops at the first that is "
            "no "
            "index or UUID"
        )
        fix = "unset CUDA_VISIBLE_DEVICES, or give indices such as 0,1"
        yield Finding(severity="blocks", name="visible-devices", what=what, fix=fix)


def _names_device(entry: str, count: int | None) -> bool:
    if entry.isdecimal():
        return count is None or int(entry) < count
    return entry.startswith(("GPU-", "MIG-"))


def check_busy(facts: DoctorFacts) -> Iterator[Finding]:
    """Memory that other processes hold cannot be planned with."""
    for gpu in facts.gpus:
        held = gpu.other_process_bytes
        if held is not None and held >= BUSY_BYTES:
            what = f"other processes hold {held / GIB:.1f} GiB of GPU {gpu.index} ({gpu.name})"
            fix = (
                "stop them (nvidia-smi lists them), hide this GPU (CUDA_VISIBLE_DEVICES), or "
                "plan "
                "with --max-memory"
            )
            yield Finding(severity="hurts", name="gpu-busy", what=what, fix=fix)
        if gpu.drives_display:
            what = (
                f"GPU {gpu.index} ({gpu.name}) drives a display, which takes memory as windows open"
            )
            fix = (
                "move the display to another GPU or log out of the desktop; --reserve changes "
                "its "
                "reserve of 1 GiB"
            )
            yield Finding(severity="note", name="drives-display", what=what, fix=fix)


def check_link_and_power(facts: DoctorFacts) -> Iterator[Finding]:
    """A card that is slower than its datasheet."""
    for gpu in facts.gpus:
        limit, usual = gpu.power_limit_watts, gpu.default_power_limit_watts
        sheet = find_gpu(gpu.name, gpu.total_memory_bytes)
        usual = usual or (sheet.power_watts if sheet else None)
        if limit is not None and usual is not None and limit < 0.95 * usual:
            what = (
                f"GPU {gpu.index} ({gpu.name}) is limited to {limit:.0f} W of {usual:.0f} W: "
                "slower in long runs"
            )
            fix = f"sudo nvidia-smi -i {gpu.index} -pl {usual:.0f}, unless the limit is wanted"
            yield Finding(severity="hurts", name="power-limited", what=what, fix=fix)
        # NVML's greatest width is what card and slot can do together; the catalog knows what the
        # card can.
        lanes = sheet.pcie_lanes if sheet and sheet.pcie_generation else None
        width, full = gpu.pcie_width, lanes or gpu.pcie_max_width or 16
        if width is not None and width < full:
            what = (
                f"GPU {gpu.index} ({gpu.name}) has {width} PCIe lanes of {full}: copies from "
                "the "
                "host are slow"
            )
            fix = "move the card to a full slot; avoid plans that offload"
            yield Finding(severity="hurts", name="narrow-pcie", what=what, fix=fix)


def check_shared_memory(facts: DoctorFacts) -> Iterator[Finding]:
    """On GB10 and similar machines the page cache counts as used, and an over-allocation hangs
    the machine."""
    for gpu in facts.gpus:
        if gpu.integrated:
            what = (
                f"{gpu.name} shares the host's memory: page cache counts as used, and taking "
                "too "
                "much hangs the machine"
            )
            fix = (
                "before a run: sync; echo 3 | sudo tee /proc/sys/vm/drop_caches; swap off; no "
                "other large process"
            )
            yield Finding(severity="hurts", name="shared-memory", what=what, fix=fix)


def check_host(facts: DoctorFacts) -> Iterator[Finding]:
    """The system can run plans at all, and has enough host memory, whose lack kills runs as
    often as the GPU's."""
    host = facts.host
    if host.memory_model == "windows":
        what = (
            "plan and train need Linux or macOS: their locks and warm trial processes do not "
            "exist "
            "on Windows"
        )
        fix = "install WSL2 (wsl --install) and autotune inside it; the GPU works there"
        yield Finding(severity="blocks", name="windows", what=what, fix=fix)
    if host.memory_model == "wsl":
        what = "WSL spills GPU memory to the host without an error: steps become ten times slower"
        yield Finding(severity="hurts", name="wsl-spill", what=what, fix=NO_SPILL)
    if host.available_memory_bytes < MIN_HOST_BYTES:
        what = (
            f"{host.available_memory_bytes / GIB:.0f} GiB of host memory available: loading "
            "large "
            "models may be killed"
        )
        fix = (
            "close programs or add swap; in a container raise its limit; small models are not "
            "affected"
        )
        yield Finding(severity="hurts", name="little-host-memory", what=what, fix=fix)


def check_disk(facts: DoctorFacts) -> Iterator[Finding]:
    """Free disk space for a model and its caches."""
    free = facts.disk_free_bytes
    if free is not None and free < facts.disk_needed_bytes:
        what = (
            f"{free / GIB:.0f} GiB free on the disk for models; the largest take "
            f"{facts.disk_needed_bytes / GIB:.0f}"
        )
        fix = "free space, or set HF_HOME to a larger disk; smaller models need less"
        yield Finding(severity="hurts", name="little-disk", what=what, fix=fix)


def check_packages(facts: DoctorFacts) -> Iterator[Finding]:
    """Packages that are too old, do harm, or are missing and would help."""
    for name, minimum in MIN_VERSIONS.items():
        version = getattr(facts.versions, name)
        if version is not None and not facts.versions.has(name, minimum):
            what = f"{name} {version} is installed; autotune needs {minimum} or newer"
            fix = f"pip install '{name}>={minimum}'"
            yield Finding(severity="blocks", name=f"old-{name}", what=what, fix=fix)
    if facts.attention is not None and facts.attention.startswith("sage"):
        what = (
            f"DIFFUSERS_ATTN_BACKEND={facts.attention}: SageAttention has no backward, so "
            "nothing "
            "is learned"
        )
        fix = "unset DIFFUSERS_ATTN_BACKEND; autotune chooses an attention that trains"
        yield Finding(severity="blocks", name="sage-chosen", what=what, fix=fix)
    elif facts.versions.sageattention is not None:
        what = (
            f"sageattention {facts.versions.sageattention} is installed: it speeds up sampling "
            "and "
            "cannot train"
        )
        yield Finding(
            severity="note",
            name="sage-installed",
            what=what,
            fix="nothing: autotune does not train with it",
        )
    needs, own = facts.torchvision_needs, facts.versions.torch
    if needs is not None and own is not None and own.split("+")[0] != needs.removeprefix("torch=="):
        what = (
            f"the installed torchvision was built for {needs}, this is torch {own}: "
            "transformers "
            "may fail to import"
        )
        fix = (
            "pip uninstall torchvision (autotune does not need it), or install the one that "
            "belongs to this torch"
        )
        yield Finding(severity="blocks", name="torchvision-mismatch", what=what, fix=fix)
    if facts.gpus and facts.host.compiler is None:
        what = "no C compiler: triton kernels and torch.compile fail at their first call"
        fix = "install gcc (Debian, Ubuntu: apt install build-essential)"
        yield Finding(severity="hurts", name="no-compiler", what=what, fix=fix)


CHECKS = (
    check_driver,
    check_torch,
    check_old_card,
    check_visible_devices,
    check_packages,
    check_busy,
    check_shared_memory,
    check_host,
    check_link_and_power,
    check_disk,
)
