"""The doctor: what on a machine will hurt, found without torch and without a CUDA context."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

from packaging.requirements import Requirement
from pydantic import TypeAdapter

from autotune.machine.capabilities import CUDA_13, lacks_code
from autotune.machine.catalog import find_gpu
from autotune.machine.facts import CUDA, FREE, MEMORY_SIGNALS, TEXT, Facts, Reader, integer
from autotune.machine.sources import System
from autotune.plan.base import Frozen
from autotune.plan.hardware import Host, Versions

GIB = 2**30
MIN_HOST_BYTES = 32 * GIB  # streaming a large text encoder through the host takes 20 GiB
BUSY_BYTES = GIB  # less is a desktop, not a run
# CUDA major version: the oldest driver that runs it (minor-version compatibility, release notes).
MIN_DRIVERS = {"13": "580", "12": "525", "11": "450.80.02"}
# Qwen-Image in bf16 (58 GB on the hub), caches, checkpoints and room for a shard twice.
DISK_BYTES = 90 * GIB
# Makes a driver on Windows and WSL fail instead of moving a GPU's memory to the host.
NO_SPILL = (
    "in the NVIDIA control panel set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback'"
)

Severity = Literal["blocks", "warning", "note"]  # worst first


class Finding(Frozen):
    """One thing that will hurt, and what to do about it.

    Examples:
        >>> [finding.fix for finding in autotune.doctor() if finding.severity == "blocks"]
    """

    severity: Severity
    name: str  # stable, for scripts, e.g. `driver-too-old`
    what: str
    fix: str


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
    unreadable: str | None = None  # why not even its name is known

    @property
    def needs_cuda_12(self) -> bool:
        """Tell if CUDA 13 no longer supports the card."""
        return self.compute_capability is not None and self.compute_capability < CUDA_13


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
    "unmet": (TypeAdapter(tuple[tuple[str, str], ...]), "packages:unmet"),
    "nvidia_cards": (integer(0, 1024), "os:nvidia_cards"),
}


class DoctorFacts(Frozen):
    """Everything that the checks examine."""

    host: Host
    versions: Versions
    gpus: tuple[Gpu, ...]
    rocm: str | None = None  # HIP version that torch was built with
    visible_devices: str | None
    attention: str | None = None
    disk_free_bytes: int | None = None
    torchvision_needs: str | None = None  # e.g. `torch==2.12.0`
    unmet: tuple[tuple[str, str], ...] = ()  # e.g. `safetensors>=0.8`, and what is there instead
    nvidia_cards: int | None = None  # on the bus, with or without a driver
    nvml_absent: str | None  # why NVML is unavailable
    cuda_absent: str | None = None  # why the CUDA driver is


def read_doctor_facts(system: System) -> DoctorFacts:
    """Read what the checks need, from every source but torch. Raises as `doctor`."""
    reader = Reader(system)
    count, cuda = (reader.fact(s, integer(0, 64), f"{s}:count") for s in ("nvml", "driver"))
    count = cuda or 0 if count is None else count
    visible = reader.raw("environment:CUDA_VISIBLE_DEVICES")
    devices = [Reader(system, index) for index in range(count)]
    found = [(each.facts("device", GPU), each.absent.get("device.name")) for each in devices]
    return DoctorFacts(
        host=reader.read_host(),
        versions=reader.read_versions(),
        gpus=tuple(Gpu(index=i, unreadable=why, **facts) for i, (facts, why) in enumerate(found)),
        visible_devices=visible if isinstance(visible, str) else None,
        nvml_absent=reader.absent.get("nvml"),
        cuda_absent=reader.absent.get("driver"),
        **reader.facts("machine", OTHER),
    )


def doctor() -> tuple[Finding, ...]:
    """Find what on this machine will hurt, worst first, each with the fix. Needs no torch.

    Raises AutotuneError if the operating system does not report how much memory there is.

    Examples:
        >>> for finding in autotune.doctor():
        ...     print(finding.severity, finding.what)
    """
    return findings(read_doctor_facts(System(with_torch=False)))


def findings(facts: DoctorFacts) -> tuple[Finding, ...]:
    """List all findings, worst first; equal ones in the order of the checks."""
    found = [
        Finding(severity=severity, name=name, what=what, fix=fix)
        for check in CHECKS
        for severity, name, what, fix in check(facts)
    ]
    return tuple(sorted(found, key=lambda finding: get_args(Severity).index(finding.severity)))


Found = Iterator[tuple[Severity, str, str, str]]  # the fields of findings


def _torch_fix(versions: Versions, gpus: tuple[Gpu, ...]) -> str:
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    is_outdated = versions.driver is not None and not versions.has("driver", MIN_DRIVERS["12"])
    runs_13 = is_outdated or versions.has("driver", MIN_DRIVERS["13"])  # once it is updated
    if versions.driver is None and not gpus:
        build = "cpu"
    elif runs_13 and not any(gpu.needs_cuda_12 for gpu in gpus):
        build = "cu130"
    else:
        build = "cu129" if any(own >= (10, 0) for own in capabilities) else "cu126"
    return (
        f"{'update the driver to 580 or newer, then ' if is_outdated else ''}install the {build} "
        "build of torch 2.11 or newer (pytorch.org, 'Get started', 'Compute platform')"
    )


def _check_torch(facts: DoctorFacts) -> Found:
    versions, cuda = facts.versions, facts.versions.cuda_runtime
    get = _torch_fix(versions, facts.gpus)
    built = f"torch {versions.torch} is"
    if versions.torch is None:
        yield "blocks", "no-torch", "torch is not installed", get
    elif facts.rocm is not None:
        what = f"{built} a ROCm build: AMD GPUs are not supported here, only the CPU is used"
        yield "blocks", "rocm-torch", what, get
    elif cuda is None and facts.gpus:
        what = f"{built} built without CUDA, so {facts.gpus[0].name} is not used"
        yield "blocks", "cpu-only-torch", what, get
    elif cuda is not None and versions.driver is not None:
        minimum = MIN_DRIVERS.get(cuda.split(".")[0])
        if minimum is not None and not versions.has("driver", minimum):
            old = f"driver {versions.driver} is too old for torch {versions.torch} (CUDA {cuda})"
            what = f"{old}: needs {minimum} or newer"
            fix = get if get.startswith("update") else f"update the driver; or {get}"
            yield "blocks", "driver-too-old", what, fix
    if versions.torch is not None and not versions.has("torch", "2.11"):
        yield "warning", "old-torch", f"{built} older than autotune is tested with", get


def _check_code_for_card(facts: DoctorFacts) -> Found:
    versions, cuda = facts.versions, facts.versions.cuda_runtime
    for gpu in facts.gpus if cuda is not None else ():
        own = ".".join(map(str, gpu.compute_capability or ()))
        has = f"{gpu.name} has compute capability {own}"
        if gpu.needs_cuda_12 and versions.has("cuda_runtime", "13.0"):
            what = f"{has}; CUDA 13 needs 7.5"
            yield "blocks", "card-too-old", what, "install the cu126 build of torch"
        if lacks_code(versions, gpu.compute_capability):
            what = f"{has}: torch {versions.torch}, built with CUDA {cuda}, has no code for it"
            yield "blocks", "torch-too-old", what, _torch_fix(versions, facts.gpus)


def _check_driver(facts: DoctorFacts) -> Found:
    cuda_absent = facts.cuda_absent or ""
    if any(word in f"{facts.nvml_absent} {cuda_absent}" for word in ("mismatch", "error 803")):
        what = "NVIDIA's driver was updated: the one that runs no longer fits its libraries"
        yield "blocks", "driver-not-reloaded", what, "reboot"
    elif facts.nvidia_cards and not facts.gpus:
        what = f"{facts.nvidia_cards} NVIDIA card(s) on the bus, and no driver responds"
        fix = "install NVIDIA's driver 580 or newer; in a container, pass the GPUs in (--gpus all)"
        yield "blocks", "no-driver", what, fix
    elif facts.nvml_absent is None and "cuInit" in cuda_absent and "error 100" not in cuda_absent:
        fix = "reboot; in a container, pass the GPUs in (--gpus all)"
        yield "blocks", "cuda-does-not-start", cuda_absent, fix
    elif not facts.gpus and facts.host.memory_model != "macos":
        fix = "plan for a GPU by name: autotune plan --hardware NAME (names: autotune probe --list)"
        what = "no NVIDIA GPU was found: training uses the CPU, which takes weeks for large models"
        yield "note", "no-gpu", what, fix
    for gpu in facts.gpus:
        if gpu.unreadable is not None and facts.nvml_absent is None:
            fix = "reboot; if it happens again, check the card's power and slot (dmesg: Xid 79)"
            what = f"GPU {gpu.index} does not respond: {gpu.unreadable}"
            yield "blocks", "gpu-lost", what, fix
    if facts.nvml_absent and facts.gpus:
        fix = "install the driver's libnvidia-ml.so.1, or give it to the container"
        yield "note", "no-nvml", facts.nvml_absent, fix


def _check_visible_devices(facts: DoctorFacts) -> Found:
    """Without NVML, the GPUs that CUDA hides are not counted."""
    value = facts.visible_devices
    if value is None:
        return
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) > 1 and not entries[-1]:
        entries.pop()  # a comma at the end hides nothing
    count = len(facts.gpus) if facts.nvml_absent is None and facts.gpus else None
    wrong = next((entry for entry in entries if not _names_device(entry, count)), None)
    if wrong is not None:
        hidden = "every GPU" if wrong == entries[0] else f"every GPU after {wrong!r}"
        why = "CUDA stops at the first that is no index or UUID"
        what = f"CUDA_VISIBLE_DEVICES={value!r} hides {hidden}: {why}"
        fix = "unset CUDA_VISIBLE_DEVICES, or give indices such as 0,1"
        yield "blocks", "visible-devices", what, fix


def _names_device(entry: str, count: int | None) -> bool:
    if entry.isdecimal():
        return count is None or int(entry) < count
    return entry.startswith(("GPU-", "MIG-"))


def _check_busy(facts: DoctorFacts) -> Found:
    for gpu in facts.gpus:
        held, which = gpu.other_process_bytes, f"GPU {gpu.index} ({gpu.name})"
        if held is not None and held >= BUSY_BYTES:
            fix = "stop them (see nvidia-smi), hide it (CUDA_VISIBLE_DEVICES), or --max-memory"
            what = f"other programs hold {held / GIB:.1f} GiB of {which}"
            yield "warning", "gpu-busy", what, fix
        if gpu.drives_display:
            fix = "move it to another GPU or log out of the desktop; --reserve changes its 1 GiB"
            what = f"{which} drives a display, which takes memory as windows open"
            yield "note", "drives-display", what, fix


def _check_link_and_power(facts: DoctorFacts) -> Found:
    for gpu in facts.gpus:
        which, limit = f"GPU {gpu.index} ({gpu.name})", gpu.power_limit_watts
        sheet = find_gpu(gpu.name, gpu.total_memory_bytes)
        published = (sheet.min_power_watts or sheet.power_watts) if sheet else None
        usual = gpu.default_power_limit_watts or published
        if limit is not None and usual is not None and limit < 0.95 * usual:
            what = f"{which} is limited to {limit:.0f} of {usual:.0f} W: long runs are slower"
            fix = f"sudo nvidia-smi -i {gpu.index} -pl {usual:.0f}, unless the limit is wanted"
            yield "warning", "power-limited", what, fix
        # NVML's greatest width is that of card and slot together; the catalog knows the card's.
        lanes = sheet.pcie_lanes if sheet and sheet.pcie_generation else None
        width, full = gpu.pcie_width, lanes or gpu.pcie_max_width or 16
        if width is not None and width < full:
            what = f"{which} has {width} PCIe lanes of {full}: block swap is slow"
            fix = "move the card to a full slot, or avoid block swap (--pin swapped_blocks=0)"
            yield "warning", "narrow-pcie", what, fix


def _check_shared_memory(facts: DoctorFacts) -> Found:
    for gpu in facts.gpus:
        if gpu.integrated:
            why = "cached files count as used, and taking too much hangs the machine"
            what = f"{gpu.name} shares the system's RAM: {why}"
            fix = "first: sync; echo 3 | sudo tee /proc/sys/vm/drop_caches; no swap, no big process"
            yield "warning", "shared-memory", what, fix


def _check_host(facts: DoctorFacts) -> Found:
    host = facts.host
    if host.memory_model == "windows":
        what = "plan and train need Linux or macOS: Windows lacks file locks and forked processes"
        fix = "install WSL2 (wsl --install) and autotune inside it; the GPU works there"
        yield "blocks", "windows", what, fix
    if host.memory_model == "wsl":
        what = "WSL moves VRAM to system RAM without an error: steps become ten times slower"
        yield "warning", "wsl-spill", what, NO_SPILL
    if host.available_memory_bytes < MIN_HOST_BYTES:
        left = f"only {host.available_memory_bytes / GIB:.0f} GiB of system RAM are free"
        what = f"{left}: the system may kill the loading of large models"
        fix = "close programs, add swap, or raise a container's limit; small models load anyway"
        yield "warning", "little-host-memory", what, fix


def _check_disk(facts: DoctorFacts) -> Found:
    free = facts.disk_free_bytes
    if free is not None and free < DISK_BYTES:
        needs = f"the largest take {DISK_BYTES / GIB:.0f} GiB"
        what = f"only {free / GIB:.0f} GiB are free on the disk for models; {needs}"
        fix = "free some, or set HF_HOME to a folder on a larger disk; smaller models need less"
        yield "warning", "little-disk", what, fix


def _check_packages(facts: DoctorFacts) -> Found:
    versions = facts.versions
    for needed, instead in facts.unmet:
        requirement = Requirement(needed)
        name, fix = requirement.name, f"pip install '{needed}'"
        if not instead and name != "torch":
            yield "blocks", f"no-{name}", f"{name} is not installed, and autotune needs it", fix
        elif "missing" in instead:
            fix = f"pip install --force-reinstall --no-deps '{needed}'"
            yield "blocks", f"broken-{name}", f"{name} is half removed: {instead}", fix
        elif instead and name != "torch":
            what = f"{name} {instead} is installed; autotune needs {requirement.specifier}"
            yield "blocks", f"other-{name}", what, fix
    if facts.attention is not None and facts.attention.startswith("sage"):
        why = "SageAttention has no backward, so nothing is learned"
        what = f"DIFFUSERS_ATTN_BACKEND={facts.attention}: {why}"
        fix = "unset DIFFUSERS_ATTN_BACKEND; autotune chooses an attention that trains"
        yield "blocks", "sage-chosen", what, fix
    needs, own = facts.torchvision_needs, versions.torch
    if needs is not None and own is not None and own.split("+")[0] != needs.removeprefix("torch=="):
        built = f"the installed torchvision was built for {needs}, this is torch {own}"
        what = f"{built}: transformers may fail to import"
        fix = "pip uninstall torchvision (autotune needs none), or install this torch's own"
        yield "blocks", "torchvision-mismatch", what, fix
    if facts.gpus and facts.host.compiler is None:
        what = "no C compiler: triton kernels and torch.compile fail at their first call"
        fix = "install gcc (Debian, Ubuntu: apt install build-essential)"
        yield "warning", "no-compiler", what, fix


CHECKS: tuple[Callable[[DoctorFacts], Found], ...] = (
    _check_driver,
    _check_torch,
    _check_code_for_card,
    _check_visible_devices,
    _check_packages,
    _check_busy,
    _check_shared_memory,
    _check_host,
    _check_link_and_power,
    _check_disk,
)
