"""The attention backends and weight formats that autotune knows, one entry each. Every room reads these tables.

Entries are data: functions that need torch are named, as `package.module:function`, and looked up when first used. So
this module imports no torch, and neither should a module that defines an entry. Other distributions add entries by
entry points, which every process of autotune finds, a trial's too:

    [project.entry-points."autotune.backends"]
    my-attention = "my_package.entries:MY_ATTENTION"

Plans name entries by plain strings, so a plan from a machine with more entries than this one has still parses.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from autotune.schema import DeviceKind, HardwareProfile, Quality

if TYPE_CHECKING:
    from diffusers.models.attention_dispatch import AttentionBackendName

ENTRY_POINTS = "autotune.backends"
"""Group of the entry points that name an `AttentionBackend` or a `WeightFormat` each."""
Kernel = Literal["fused", "flash", "efficient", "cudnn", "math"]
Library = Literal["torchao", "bitsandbytes", "flash_attn", "xformers", "kernels", "sageattention"]
"""Fields of `Versions` that not every entry needs."""
SkipReason = Callable[[HardwareProfile], str | None]


@dataclass(frozen=True)
class Requirements:
    """What a machine must have before an entry works on it; `autotune.hardware` evaluates it."""

    device_kinds: tuple[DeviceKind, ...] = ()
    """Kinds of devices on which it works; empty for all."""
    compute_capability: tuple[int, int] = (0, 0)
    """Lowest one, of CUDA devices."""
    library: Library | None = None
    """Package that must be installed. What was measured with it holds for one version of it."""
    min_version: str = "0"
    min_version_on_cpu: str | None = None
    """If CPUs need a newer version than other devices."""
    compiles_on: tuple[DeviceKind, ...] = ()
    """Kinds of devices on which it needs torch.compile."""

    def __post_init__(self) -> None:
        if self.library not in (None, *get_args(Library)):
            raise ValueError(f"no library that autotune looks for: {self.library!r}")


@dataclass(frozen=True)
class Entry:
    """What attention backends and weight formats have in common."""

    knob: ClassVar[str]
    """Field of `Candidate` that names an entry."""
    name: str
    summary: str
    """What people read about it if the machine can use it."""
    needs: Requirements = Requirements()
    _: KW_ONLY
    tolerance: float = 0.0
    """Relative error of adapter gradients, against plain attention on unquantized random weights in fp32, up to which
    it counts as the entry's own; 0 if there is none."""
    tolerance_reason: str = ""
    """Where an error of that size comes from."""
    skip_reason: SkipReason = lambda hardware: None
    """Why no search tries it on a machine that could use it; None if it is worth trying."""

    @property
    def capability(self) -> str:
        """Name of the machine's capability to use it."""
        return f"{self.knob}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Entry):
    """One implementation of attention in diffusers' dispatcher, under diffusers' name or, with `function`, a new one in
    lower case."""

    knob = "attention"
    kernel: Kernel = "fused"
    """Kernel whose memory and time the cost model charges on a GPU; `fused` is the one that torch's own dispatcher
    picks. On a CPU all but `math` cost what torch's fused kernel costs there."""
    refuses_masks: bool = False
    """Whether it raises on any mask, even one that is all True."""
    is_probed: bool = True
    """Whether the probe measures its speed."""
    unusable_reason: str = ""
    """Why no machine can train with it; empty if some can."""
    function: str = ""
    """Implementation to add to diffusers' dispatcher, if diffusers lacks it: `package.module:function`, called as
    diffusers' native backend is, with query, key and value of shape (batch, tokens, heads, head dimension)."""
    tolerance: float = 0.02
    tolerance_reason: str = "another kernel sums in another order and rounds other intermediate results"

    def diffusers_name(self) -> "AttentionBackendName":
        """The member of diffusers' enumeration that selects this backend. Imports diffusers.

        The enumeration is closed, so a backend with a `function` of its own is added to it through its internals.

        Raises:
            ValueError: this diffusers has no such backend.
        """
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        if self.function and self.name not in AttentionBackendName.__members__:
            member = str.__new__(AttentionBackendName, self.name)
            member._name_ = member._value_ = self.name
            AttentionBackendName._member_map_[self.name] = member
            AttentionBackendName._value2member_map_[self.name] = member
            _AttentionBackendRegistry.register(member)(resolve_name(self.function))
        return AttentionBackendName(self.name)


@dataclass(frozen=True, kw_only=True)
class WeightFormat(Entry):
    """One way to store the weights of frozen Linear layers."""

    knob = "quantization"
    quality: Quality
    """The strictest quality floor that admits it."""
    bytes_per_parameter: float
    """Scales included."""
    quantize: str = ""
    """`package.module:function` that gets each `torch.nn.Linear` when its weight has arrived, on its device. It changes
    the layer in place, or returns the layer that takes its place: a Linear or another layer that peft adapts, with all
    that it stores as frozen parameters. Empty if weights stay as they are."""
    stand_in: str = ""
    """`package.module:function` that makes a layer on the meta device store, keep for backward and compute as much as
    `quantize` does, for the cost model's trace. It gets the layer, and `cuda` or `cpu`. Empty if `quantize` works on
    the meta device itself."""
    stored_dtype: str = ""
    """torch's name of the dtype that is converted before each product; the probe measures conversions by it."""
    product_dtype: str = ""
    """`int8` or `fp8` if products have factors of 8 bits; the probe measures them, and the cost model charges them.
    Empty if weights are converted first."""
    quantizing_slices: float | None = None
    """How many slices' bytes (`autotune.quantization.SLICE_BYTES`) quantizing takes for a moment beside the layer; None
    if it does not work in slices and takes several times the layer."""
    hides_dtype: bool = False
    """Whether weights show another dtype than products are computed in: what casts its activations to the dtype of a
    weight, as T5 does, would compute nonsense."""
    can_offload: bool = True
    """Whether weights can wait on the host and visit the device: all that belongs to them is in tensors."""
    is_tried_for_encoders: bool = False
    """Whether text encoders that do not fit otherwise are stored in it without being asked for."""

    @property
    def can_shard(self) -> bool:
        """Whether several processes can share its weights: FSDP2 takes plain tensors of one dtype."""
        return not self.quantize

    def meets(self, floor: Quality) -> bool:
        """Whether the quality floor admits it."""
        return get_args(Quality).index(self.quality) <= get_args(Quality).index(floor)


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E]):
    """Entries by name: autotune's own, then those of other distributions."""

    _extensions: ClassVar[dict[str, str] | None] = None

    def __init__(self, *entries: E) -> None:
        self._entries: dict[str, E] = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> E:
        self.load_extensions()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self.load_extensions()
        return iter(self._entries)

    def __len__(self) -> int:
        self.load_extensions()
        return len(self._entries)

    def add(self, entry: E) -> None:
        """Add an entry. Raises ValueError if there is another of its name."""
        if self._entries.setdefault(entry.name, entry) is not entry:
            raise ValueError(f"there is already an entry called {entry.name}")

    @staticmethod
    def load_extensions() -> Mapping[str, str]:
        """Add the entries of other distributions, once; returns the version of each distribution that has any."""
        if Registry._extensions is None:
            Registry._extensions = {}  # before an entry's own module reads a registry
            Registry._extensions |= load_entry_points(ENTRY_POINTS, register)
        return Registry._extensions


def load_entry_points(group: str, add: Callable[[Any], None]) -> dict[str, str]:
    """Give each entry point of a group to `add`; returns the version of each distribution that added any.

    What is broken costs a warning, not the command.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=group):
        try:
            add(point.load())
        except Exception as error:
            warnings.warn(f"{point.value} adds nothing to autotune: {error}", stacklevel=2)
        else:
            found |= {point.dist.name: point.dist.version} if point.dist else {}
    return found


def register(entry: AttentionBackend | WeightFormat) -> None:
    """Add an entry to this process. Trials run in others: what a plan is to choose needs an entry point.

    Raises:
        TypeError: it is no entry.
        ValueError: there is another entry of its name.
    """
    if isinstance(entry, AttentionBackend):
        ATTENTION_BACKENDS.add(entry)
    elif isinstance(entry, WeightFormat):
        WEIGHT_FORMATS.add(entry)
    else:
        raise TypeError(f"neither an AttentionBackend nor a WeightFormat: {entry!r}")


CUDNN_WINS, CUDNN_PREFERRED = (9, 10), "9.15.1"
"""Major compute capabilities on which cuDNN attention has beaten flash (1.7 to 2.3 times on Hopper), and the version
from which torch's dispatcher picks it first on them, with and without a mask
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`, torch 2.11 to 2.14)."""


def prefers_cudnn(hardware: HardwareProfile) -> bool:
    """Whether `native` is cuDNN's kernel in half precision, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is set."""
    major = (hardware.device.compute_capability or (0, 0))[0]
    return major in CUDNN_WINS and hardware.versions.has("cudnn", CUDNN_PREFERRED)


def _refused(reason: str, library: Library | None, *names: str) -> Iterator[AttentionBackend]:
    return (AttentionBackend(name, "", Requirements(library=library), unusable_reason=reason) for name in names)


MASKS_DOUBTFUL = "trains; NaN gradients seen with a mask at some lengths"
NO_BACKWARD = "no backward: gradients vanish without an error"
FETCHED = "not offered: diffusers would fetch its kernel from the hub and run it, and a plan runs no fetched code"
GPU, AMPERE = Requirements(("cuda",)), Requirements(("cuda",), (8, 0))
FLASH_ATTN = Requirements(("cuda",), (8, 0), "flash_attn", "2.6.3")
XFORMERS = Requirements(("cuda",), (7, 0), "xformers", "0.0.29")

ATTENTION_BACKENDS: Registry[AttentionBackend] = Registry(
    AttentionBackend("native", "PyTorch chooses the kernel"),
    AttentionBackend(
        "_native_flash",
        "trains; takes no mask at all",
        Requirements(("cuda", "cpu"), (8, 0)),
        kernel="flash",
        refuses_masks=True,
    ),
    AttentionBackend("_native_math", "plain matrix products, slow and always there", kernel="math"),
    AttentionBackend("_native_efficient", "trains, with masks too", GPU, kernel="efficient"),
    AttentionBackend("_native_cudnn", MASKS_DOUBTFUL, AMPERE, kernel="cudnn"),
    AttentionBackend("flash", "trains; takes no mask", FLASH_ATTN, kernel="flash", refuses_masks=True),
    AttentionBackend("xformers", "trains", XFORMERS, kernel="efficient"),
    *_refused("not offered: it is slow unless compiled by itself", None, "flex"),
    *_refused(FETCHED, "kernels", "flash_hub", "_flash_3_hub", "flash_4_hub"),
    *_refused("raises in backward", "flash_attn", "_flash_3"),
    *_refused(NO_BACKWARD, "sageattention", "sage", "sage_hub", "sage_varlen"),
)
"""`native` is the default; it is held against plain products in fp32, and the others against it."""


def _skip_for_int8(reason: str, *device_kinds: DeviceKind) -> SkipReason:
    """On these kinds of devices, if torchao's int8 can be used."""

    def skip_reason(hardware: HardwareProfile) -> str | None:
        better = hardware.capability(WEIGHT_FORMATS["torchao-int8"].capability).available
        return reason if better and hardware.device.kind in device_kinds else None

    return skip_reason


TORCHAO = Requirements(("cuda", "cpu"), library="torchao", min_version="0.18")
BNB_INT8 = Requirements(("cuda", "cpu"), (7, 5), "bitsandbytes", "0.45", min_version_on_cpu="0.50")
BNB_NF4 = replace(BNB_INT8, compute_capability=(6, 0))
"""bitsandbytes' kernels for CPUs are younger than those for CUDA; 0.50 is the first that was tried."""
FAR_FROM_REAL = (
    "as small as torchao-int8 and at most a few percent faster, but three to six times as far from the real weights, "
    "and further where they are small: without scales, what is below 0.016 loses bits"
)
"""Errors of a layer's outputs, normal weights: int8 0.9% at any size; float8 without scales 2.7% at a standard
deviation of 0.05, 3.3% at 0.02, 5.7% at 0.01, beyond the 5% of `--quality high`."""
PLAIN_ON_CPU = (
    "on a CPU its products are plain operations in fp32 that need 16 bytes an output for a moment; torchao-int8 "
    "stores as little and multiplies at once"
)
EIGHT_BITS = Requirements(("cuda", "cpu"), (7, 5), compiles_on=("cuda",))
"""torch's own products; what surrounds them would take the time that they save, if it were not compiled."""


def _skip_slow_fp8(hardware: HardwareProfile) -> str | None:
    slow = "a CPU has no float8 units: a product took two to four times fp32's time, int8's a third"
    return slow if hardware.device.kind == "cpu" else None


WEIGHT_FORMATS: Registry[WeightFormat] = Registry(
    WeightFormat("none", "weights stay as they are", quality="exact", bytes_per_parameter=2.0),
    WeightFormat(
        "torchao-int8",
        "weight-only int8",
        TORCHAO,
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.torchao_layer:quantize_int8",
        quantizing_slices=8,
        stored_dtype="int8",
        tolerance=0.05,
        tolerance_reason="8 bits per row: weights are wrong by about 1%",
        is_tried_for_encoders=True,
    ),
    WeightFormat(
        "torchao-fp8",
        "weight-only float8",
        TORCHAO,
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.torchao_layer:quantize_float8",
        quantizing_slices=8,
        stored_dtype="float8_e4m3fn",
        tolerance=0.2,
        tolerance_reason="3 bits of mantissa: weights are wrong by about 3%",
    ),
    WeightFormat(
        "layerwise-fp8",
        "float8 weights, cast for each product",
        Requirements(("cuda", "cpu")),
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.frozen_linear:quantize_layerwise",
        quantizing_slices=0,  # a cast takes nothing else
        stored_dtype="float8_e4m3fn",
        tolerance=0.2,
        tolerance_reason="3 bits of mantissa and no scales: weights are wrong by 3%, small ones by more",
        hides_dtype=True,
        skip_reason=_skip_for_int8(FAR_FROM_REAL, "cuda", "cpu"),
    ),
    WeightFormat(
        "int8-matmul",
        "int8 weights and activations, multiplied as they are",
        EIGHT_BITS,
        quality="compact",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.product_layer:quantize_int8",
        product_dtype="int8",
        quantizing_slices=4,
        tolerance=0.08,
        tolerance_reason="8 bits per row for weights, activations and gradients",
        hides_dtype=True,
    ),
    WeightFormat(
        "fp8-matmul",
        "float8 weights and activations, multiplied as they are",
        replace(EIGHT_BITS, compute_capability=(8, 9)),
        quality="compact",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.product_layer:quantize_float8",
        product_dtype="fp8",
        quantizing_slices=4,
        tolerance=0.3,
        tolerance_reason="3 bits of mantissa for weights, activations and gradients",
        hides_dtype=True,
        skip_reason=_skip_slow_fp8,
    ),
    WeightFormat(
        "bnb-int8",
        "LLM.int8",
        BNB_INT8,
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.quantization.bitsandbytes_layer:quantize_int8",
        stand_in="autotune.cost.quantized:stand_in_for_int8",
        quantizing_slices=8,
        stored_dtype="int8",
        tolerance=0.08,
        tolerance_reason="8 bits for weights and, in the forward pass, for activations",
        hides_dtype=True,
        can_offload=False,
        skip_reason=_skip_for_int8(PLAIN_ON_CPU, "cpu"),
    ),
    WeightFormat(
        "bnb-nf4",
        "4-bit NormalFloat",
        BNB_NF4,
        quality="compact",
        bytes_per_parameter=0.52,  # half a byte, and doubly quantized scales of 64 values each
        quantize="autotune.quantization.bitsandbytes_layer:quantize_nf4",
        stand_in="autotune.cost.quantized:stand_in_for_nf4",
        quantizing_slices=8,
        stored_dtype="uint8",
        tolerance=0.6,
        tolerance_reason="4 bits: weights are wrong by about 10%",
        hides_dtype=True,
        can_offload=False,
        is_tried_for_encoders=True,
    ),
)
"""Errors of gradients, as measured on tiny models of all families: 1 to 2% of int8, 6 to 11% and 6 to 12% of the
float8s, 22 to 38% of nf4, by weights alone; of Krea 2's 16 and 17% and 54%. With products in 8 bits 2 to 5% of int8, 7
to 16% of float8; of Krea 2's 7 to 11% and 22 to 26%. Slices, as measured on CPUs: nf4 7.4,
float8 6.5, LLM.int8 5 and int8 4 in bf16, all 2 to 2.7 in fp32 (weights of 256 x 256 to 2048 x 4096, the profiler's
count)."""
