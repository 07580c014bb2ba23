"""What this machine can use and why, or why not. Pure: a table of rules over the facts.

Names are dotted, `<group>.<choice>`, the choice under the name that its knob and the plan use:

    precision.bf16 .fp16 .tf32 .fp32 .fp8       compute dtypes (fp8: matrix units, not storage)
    attention.<name>                            attention backends (`autotune.backends`)
    quantization.<name>                         formats of frozen weights (`autotune.backends`)
    compile                                     torch.compile with a working triton and compiler
    gds                                         GPU direct storage
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.backends import ATTENTION_BACKENDS, WEIGHT_FORMATS, Requirements
from autotune.schema import Capability, Device, Host, Versions, is_older


@dataclass(frozen=True)
class Machine:
    """What rules examine."""

    device: Device
    host: Host
    versions: Versions


Need = Callable[[Machine], str | None]
"""Why the machine does not meet the need; None if it does."""


@dataclass(frozen=True)
class Rule:
    """A feature, available if every need is met; `why` is the reason that is shown then."""

    name: str
    why: str
    needs: tuple[Need, ...] = ()


def on(*kinds: str) -> Need:
    """Only on devices of these kinds."""
    return lambda m: None if m.device.kind in kinds else f"needs {' or '.join(kinds)}, this is {m.device.kind}"


def capability(least: tuple[int, int]) -> Need:
    """On CUDA, at least this compute capability; other kinds pass."""

    def need(m: Machine) -> str | None:
        own = m.device.compute_capability
        if m.device.kind != "cuda" or (own is not None and own >= least):
            return None
        return f"hardware: needs compute capability {_dotted(least)}, this is {_dotted(own)}"

    return need


def package(field: str, least: str = "0") -> Need:
    """A package of at least this version; `field` is one of `Versions`."""

    def need(m: Machine) -> str | None:
        version = getattr(m.versions, field)
        if version is None:
            return f"package: {field} is not installed"
        return f"package: needs {field} {least}, this is {version}" if is_older(version, least) else None

    return need


def never(reason: str) -> Need:
    """On no machine."""
    return lambda _: reason


def compiler(m: Machine) -> str | None:
    """A C compiler, which triton and inductor call."""
    return None if m.host.compiler else "no C compiler on PATH: install gcc or clang"


def linux(m: Machine) -> str | None:
    """Linux, natively or under WSL."""
    return None if m.host.memory_model in ("linux", "wsl") else f"needs Linux, this is {m.host.system}"


def triton(m: Machine) -> str | None:
    """Triton, by which torch.compile generates GPU code."""
    return package("triton")(m) if m.device.kind == "cuda" else None


def fast_fp16(m: Machine) -> str | None:
    """fp16 arithmetic in hardware, which CPUs emulate."""
    return "hardware: fp16 products are very slow on a CPU" if m.device.kind == "cpu" else None


def storage_device(m: Machine) -> str | None:
    """The kernel module of GPUDirect Storage."""
    return None if m.host.gpu_direct_storage else "/dev/nvidia-fs0 does not exist: the nvidia-fs module is not loaded"


def requirements(needs: Requirements) -> tuple[Need, ...]:
    """What an attention backend or a weight format needs, each by itself."""
    found = [on(*needs.device_kinds)] if needs.device_kinds else []
    found.append(capability(needs.compute_capability))
    if needs.library is None:
        return tuple(found)
    library, on_cpu = needs.library, needs.min_version_on_cpu or needs.min_version
    return (*found, lambda m: package(library, on_cpu if m.device.kind == "cpu" else needs.min_version)(m))


CUDA = on("cuda")
BF16 = (8, 0)
NO_BF16 = "this GPU has no bf16"
"""How the note begins that says so."""
CUDA_13 = (7, 5)
"""The least compute capability that CUDA 13 knows."""

RULES: tuple[Rule, ...] = (
    Rule("precision.fp32", "everywhere"),
    Rule("precision.bf16", "bf16 arithmetic", (on("cuda", "cpu", "mps"), capability(BF16))),
    Rule("precision.fp16", "fp16 arithmetic", (fast_fp16, capability((7, 0)))),
    Rule("precision.tf32", "tensor cores round fp32 inputs", (CUDA, capability((8, 0)))),
    Rule("precision.fp8", "fp8 matrix units", (CUDA, capability((8, 9)))),
    Rule(
        "compile", "a compiler and what it needs are there", (on("cuda", "cpu"), compiler, triton, capability((7, 0)))
    ),
    Rule("gds", "reads go from disk to GPU", (CUDA, linux, storage_device)),
)


def capabilities_of(device: Device, host: Host, versions: Versions) -> tuple[Capability, ...]:
    """Every capability of a machine, available or not, in the table's order."""
    machine = Machine(device, host, versions)
    return tuple(_gate(rule, machine) for rule in (*RULES, *_rules_of_backends()))


def _rules_of_backends() -> Iterator[Rule]:
    for backend in ATTENTION_BACKENDS.values():
        refused = (never(backend.unusable_reason),) if backend.unusable_reason else ()
        yield Rule(backend.capability, backend.summary, refused or requirements(backend.needs))
    for weight_format in WEIGHT_FORMATS.values():
        yield Rule(weight_format.capability, weight_format.summary, requirements(weight_format.needs))


def without_bf16(device: Device) -> tuple[str, ...]:
    """What to tell of a card that cannot train in bf16; nothing where one can."""
    own = device.compute_capability
    if device.kind != "cuda" or own is None or own >= BF16:
        return ()
    why = f"compute capability {_dotted(own)}, it takes {_dotted(BF16)}"
    return (f"{NO_BF16} ({why}): it trains in fp32, without its tensor cores; fp16 training is not offered",)


def _gate(rule: Rule, machine: Machine) -> Capability:
    missing = next(filter(None, (need(machine) for need in rule.needs)), None)
    return Capability(name=rule.name, available=missing is None, reason=missing or rule.why)


def _dotted(own: tuple[int, int] | None) -> str:
    return "unknown" if own is None else f"{own[0]}.{own[1]}"
