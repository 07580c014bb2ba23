"""What this machine can use and why, or why not. Pure: a table of rules over the facts.

Names are dotted, `<group>.<choice>`, the choice under the name that its knob and the plan use:

    precision.bf16 .fp16 .tf32 .fp32 .fp8       compute dtypes (fp8: matrix units, not storage)
    attention.<name>                            diffusers' backend names, e.g. attention._native_cudnn
    quantization.none .torchao-int8 .torchao-fp8 .bnb-nf4 .bnb-int8 .layerwise-fp8     storage of frozen weights
    compile                                     torch.compile with a working triton and compiler
    gds                                         GPU direct storage
"""

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from autotune.schema import Capability, Device, Host, Versions


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


def older(version: str | None, least: str) -> bool:
    """Whether `version` is absent, unreadable or below `least`, compared as versions (so "9.0" < "13.0")."""
    try:
        return version is None or Version(version.split("+")[0]) < Version(least)
    except InvalidVersion:
        return True


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
        return f"package: needs {field} {least}, this is {version}" if older(version, least) else None

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


def casts_float8(m: Machine) -> str | None:
    """Conversion of float8, which CPUs and all CUDA devices can do, in software if not in hardware."""
    kind = m.device.kind
    return None if kind in ("cuda", "cpu") else f"torch has no float8 on {kind}: nothing could be cast from it"


def storage_device(m: Machine) -> str | None:
    """The kernel module of GPUDirect Storage."""
    return None if m.host.gpu_direct_storage else "/dev/nvidia-fs0 does not exist: the nvidia-fs module is not loaded"


def bitsandbytes(m: Machine) -> str | None:
    """bitsandbytes, whose kernels for CPUs are newer than those for CUDA; 0.50 is the first that was tested."""
    return package("bitsandbytes", "0.50" if m.device.kind == "cpu" else "0.45")(m)


CUDA = on("cuda")
BF16 = (8, 0)
NO_BF16 = "this GPU has no bf16"
"""How the note begins that says so."""
CUDA_13 = (7, 5)
"""The least compute capability that CUDA 13 knows."""
CUDA_OR_CPU = on("cuda", "cpu")
FLASH_2 = (CUDA, capability((8, 0)))
NO_BACKWARD = "no backward: gradients vanish without an error"
FETCHED = "not offered: diffusers would fetch its kernel from the hub and run it, and a plan runs no fetched code"
NOT_OFFERED = {
    "flex": "not offered: it is slow unless compiled by itself",
    "flash_hub": FETCHED,
    "_flash_3_hub": FETCHED,
    "_flash_3": "raises in backward",
    "flash_4_hub": FETCHED,
    **dict.fromkeys(("sage", "sage_hub", "sage_varlen"), NO_BACKWARD),
}
"""diffusers' other backends, and why none of them is a choice on any machine."""

RULES: tuple[Rule, ...] = (
    Rule("precision.fp32", "everywhere"),
    Rule("precision.bf16", "bf16 arithmetic", (on("cuda", "cpu", "mps"), capability(BF16))),
    Rule("precision.fp16", "fp16 arithmetic", (fast_fp16, capability((7, 0)))),
    Rule("precision.tf32", "tensor cores round fp32 inputs", (CUDA, capability((8, 0)))),
    Rule("precision.fp8", "fp8 matrix units", (CUDA, capability((8, 9)))),
    Rule("attention.native", "PyTorch chooses the kernel"),
    Rule("attention._native_math", "plain matrix products, slow and always there"),
    Rule("attention._native_flash", "trains; takes no mask at all", (on("cuda", "cpu"), capability((8, 0)))),
    Rule("attention._native_efficient", "trains, with masks too", (CUDA,)),
    Rule("attention._native_cudnn", "trains; NaN gradients seen with a mask at some lengths", FLASH_2),
    Rule("attention.xformers", "trains", (CUDA, capability((7, 0)), package("xformers", "0.0.29"))),
    Rule("attention.flash", "trains; takes no mask", (*FLASH_2, package("flash_attn", "2.6.3"))),
    *(Rule(f"attention.{name}", "", (never(why),)) for name, why in NOT_OFFERED.items()),
    Rule("quantization.none", "weights stay as they are"),
    Rule("quantization.torchao-int8", "weight-only int8", (on("cuda", "cpu"), package("torchao", "0.18"))),
    Rule("quantization.torchao-fp8", "weight-only float8", (on("cuda", "cpu"), package("torchao", "0.18"))),
    Rule("quantization.bnb-nf4", "4-bit NormalFloat", (CUDA_OR_CPU, capability((6, 0)), bitsandbytes)),
    Rule("quantization.bnb-int8", "LLM.int8", (CUDA_OR_CPU, capability((7, 5)), bitsandbytes)),
    Rule("quantization.layerwise-fp8", "float8 storage cast per layer", (casts_float8,)),
    Rule(
        "compile", "a compiler and what it needs are there", (on("cuda", "cpu"), compiler, triton, capability((7, 0)))
    ),
    Rule("gds", "reads go from disk to GPU", (CUDA, linux, storage_device)),
)


def capabilities_of(device: Device, host: Host, versions: Versions) -> tuple[Capability, ...]:
    """Every capability of a machine, available or not, in the table's order."""
    machine = Machine(device, host, versions)
    return tuple(_gate(rule, machine) for rule in RULES)


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
