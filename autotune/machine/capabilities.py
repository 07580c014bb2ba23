"""What this machine can use and why, or why not. Pure: a table of rules over the facts.

Names are dotted, `<group>.<choice>`, the choice under the name that its knob and the plan use:

    precision.bf16 .fp16 .tf32 .fp32 .fp8       compute dtypes (fp8: matrix units, not storage)
    attention.<name>                            attention backends (`autotune.backends`)
    quantization.<name>                         formats of frozen weights (`autotune.backends`)
    compile                                     torch.compile with a working triton and compiler
    gds                                         GPUDirect Storage
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.entries import Requirements
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.plan.hardware import Capability, Device, Host, Versions


@dataclass(frozen=True)
class Machine:
    """What rules examine."""

    device: Device
    host: Host
    versions: Versions


Obstacle = Callable[[Machine], str | None]
"""Why a machine cannot use a feature; None if this does not prevent it."""
NONE_NEEDED = Requirements()


@dataclass(frozen=True)
class Rule:
    """A feature, available if its needs are met and there is no obstacle; `why` is the reason
    that is shown then."""

    name: str
    why: str
    needs: Requirements = NONE_NEEDED
    obstacles: tuple[Obstacle, ...] = ()


def unmet(needs: Requirements, machine: Machine) -> str | None:
    """The first of the requirements that the machine does not meet, in words; None if it meets
    all."""
    device = machine.device
    if needs.device_kinds and device.kind not in needs.device_kinds:
        return f"needs {' or '.join(needs.device_kinds)}, this is {device.kind}"
    own = device.compute_capability
    if device.kind == "cuda" and (own is None or own < needs.compute_capability):
        return (
            f"hardware: needs compute capability {_dotted(needs.compute_capability)}, this is "
            f"{_dotted(own)}"
        )
    if device.kind == "cuda" and own is not None and needs.only_major not in (None, own[0]):
        return f"hardware: needs compute capability {needs.only_major}.x, this is {_dotted(own)}"
    compiles = device.kind in needs.compiles_on
    return (
        compiles and (missing_compiler(machine) or missing_triton(machine))
    ) or _missing_library(needs, machine)


def _missing_library(needs: Requirements, machine: Machine) -> str | None:
    device, versions, library = machine.device, machine.versions, needs.library
    if library is None:
        return None
    minimum = (needs.min_version_on_cpu if device.kind == "cpu" else None) or needs.min_version
    if versions.has(library, minimum):
        return None
    if (version := getattr(versions, library)) is None:
        return f"package: {library} is not installed"
    return f"package: needs {library} {minimum}, this is {version}"


def missing_compiler(machine: Machine) -> str | None:
    """Triton and inductor call a C compiler."""
    return None if machine.host.compiler else "no C compiler on PATH: install gcc or clang"


def missing_triton(machine: Machine) -> str | None:
    """torch.compile generates GPU code by triton."""
    missing = machine.device.kind == "cuda" and machine.versions.triton is None
    return "package: triton is not installed" if missing else None


def slow_fp16(machine: Machine) -> str | None:
    """CPUs emulate fp16 arithmetic."""
    return (
        "hardware: fp16 products are very slow on a CPU" if machine.device.kind == "cpu" else None
    )


def faulty_fp16(machine: Machine) -> str | None:
    """GeForce 16 cards have no tensor cores either."""
    faulty = has_faulty_fp16(machine.device)
    return "known bug: fp16 gives NaN on GTX 16 cards (pytorch/pytorch#58123)" if faulty else None


def has_faulty_fp16(device: Device) -> bool:
    """Whether fp16 gives NaN on the card."""
    return "GTX 16" in device.name


def missing_gpu_direct_storage(machine: Machine) -> str | None:
    """GPUDirect Storage needs Linux, or WSL, and its kernel module."""
    if machine.host.memory_model not in ("linux", "wsl"):
        return f"needs Linux, this is {machine.host.system}"
    if machine.host.gpu_direct_storage:
        return None
    return "/dev/nvidia-fs0 does not exist: the nvidia-fs module is not loaded"


BF16 = (8, 0)
"""Lowest compute capability with bf16 arithmetic."""
FP16 = (7, 0)
"""Lowest compute capability with tensor cores, which are fp16's."""
NO_BF16 = "this GPU has no bf16"
"""How the note about that begins."""
CUDA_13 = (7, 5)
"""Lowest compute capability that CUDA 13 supports."""


RULES: tuple[Rule, ...] = (
    Rule("precision.fp32", "everywhere"),
    Rule("precision.bf16", "bf16 arithmetic", Requirements(("cuda", "cpu", "mps"), BF16)),
    Rule(
        "precision.fp16",
        "fp16 arithmetic",
        Requirements(compute_capability=FP16),
        (slow_fp16, faulty_fp16),
    ),
    Rule("precision.tf32", "tensor cores round fp32 inputs", Requirements(("cuda",), (8, 0))),
    Rule("precision.fp8", "fp8 matrix units", Requirements(("cuda",), (8, 9))),
    Rule(
        "compile",
        "a compiler and what it needs are there",
        Requirements(("cuda", "cpu"), (7, 0)),
        (missing_compiler, missing_triton),
    ),
    Rule(
        "gds", "reads go from disk to GPU", Requirements(("cuda",)), (missing_gpu_direct_storage,)
    ),
)


def capabilities_of(device: Device, host: Host, versions: Versions) -> tuple[Capability, ...]:
    """Every capability of a machine, available or not, in the table's order."""
    machine = Machine(device, host, versions)
    return tuple(_evaluate(rule, machine) for rule in (*RULES, *_backend_rules()))


def _backend_rules() -> Iterator[Rule]:
    for backend in ATTENTION_BACKENDS.values():
        if reason := backend.why_not:
            yield Rule(backend.capability, backend.summary, obstacles=(_always(reason),))
        else:
            yield Rule(backend.capability, backend.summary, backend.needs)
    for weight_format in WEIGHT_FORMATS.values():
        yield Rule(weight_format.capability, weight_format.summary, weight_format.needs)


def _always(reason: str) -> Obstacle:
    return lambda _: reason


def _evaluate(rule: Rule, machine: Machine) -> Capability:
    reasons = (unmet(rule.needs, machine), *(obstacle(machine) for obstacle in rule.obstacles))
    missing = next(filter(None, reasons), None)
    return Capability(name=rule.name, available=missing is None, reason=missing or rule.why)


def without_bf16(device: Device) -> tuple[str, ...]:
    """The note on a card that cannot train in bf16; none on other devices."""
    own = device.compute_capability
    if device.kind != "cuda" or own is None or own >= BF16:
        return ()
    why = f"compute capability {_dotted(own)}, bf16 needs {_dotted(BF16)}"
    trains = (
        "it trains in fp16 with a loss scale; models that overflow fp16 in fp32, without its "
        "tensor cores"
    )
    if own < FP16 or has_faulty_fp16(device):
        trains = "it trains in fp32"
    return (f"{NO_BF16} ({why}): {trains}",)


def _dotted(own: tuple[int, int] | None) -> str:
    return "unknown" if own is None else f"{own[0]}.{own[1]}"
