"""What an entry of a table holds."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args

from autotune.plan.hardware import DeviceKind, HardwareProfile
from autotune.plan.workload import Quality

if TYPE_CHECKING:
    from diffusers.models.attention_dispatch import AttentionBackendName

Kernel = Literal["fused", "flash", "flash3", "flash4", "efficient", "cudnn", "math"]
Library = Literal[
    "torchao",
    "bitsandbytes",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "xformers",
    "kernels",
    "sageattention",
]
"""Fields of `Versions` that not every entry needs."""
WhyNot = Callable[[HardwareProfile], str | None]


@dataclass(frozen=True)
class Requirements:
    """What a machine must have before an entry works on it; `autotune.machine` evaluates it."""

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
    only_major: int | None = None
    """Major compute capability of the CUDA devices that it is compiled for, if it is for no
    other."""

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
    """Relative error of adapter gradients, against plain attention on unquantized random weights
    in fp32, up to which it counts as the entry's own; 0 if there is none."""
    tolerance_reason: str = ""
    """Where an error of that size comes from."""
    why_not_searched: WhyNot = lambda hardware: None
    """Why no search tries it on a machine that could use it; None if it is worth trying."""

    @property
    def capability(self) -> str:
        """Name of the machine's capability to use it."""
        return f"{self.knob}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Entry):
    """One implementation of attention in diffusers' dispatcher, under diffusers' name or, with
    `function`, a new one in lower case."""

    knob = "attention"
    kernel: Kernel = "fused"
    """Kernel whose memory and time the cost model charges on a GPU; `fused` is the one that
    torch's own dispatcher picks. On a CPU all but `math` cost what torch's fused kernel costs
    there."""
    refuses_masks: bool = False
    """Whether it raises on any mask, even one that is all True."""
    is_probed: bool = True
    """Whether the probe measures its speed."""
    why_not: str = ""
    """Why no machine can train with it; empty if some can."""
    function: str = ""
    """Implementation to add to diffusers' dispatcher, if diffusers lacks it:
    `package.module:function`, called as diffusers' native backend is, with query, key and value
    of shape (batch, tokens, heads, head dimension)."""
    tolerance: float = 0.02
    tolerance_reason: str = (
        "another kernel sums in another order and rounds other intermediate results"
    )

    def diffusers_name(self) -> "AttentionBackendName":
        """The member of diffusers' enumeration that selects this backend. Imports diffusers.

        The enumeration is closed, so a backend with a `function` of its own is added to it through
        its internals.

        Raises:
            ValueError: this diffusers has no such backend.
        """
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            _AttentionBackendRegistry,
        )

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
    """`package.module:function` that gets each `torch.nn.Linear` when its weight has arrived, on
    its device. It changes the layer in place, or returns the layer that takes its place: a
    Linear or another layer that peft adapts, with all that it stores as frozen parameters. Empty
    if weights stay as they are."""
    stand_in: str = ""
    """`package.module:function` that makes a layer on the meta device store, keep for backward
    and compute as much as `quantize` does, for the cost model's trace. It gets the layer, and
    `cuda` or `cpu`. Empty if `quantize` works on the meta device itself."""
    stored_dtype: str = ""
    """torch's name of the dtype that is converted before each product; the probe measures
    conversions by it."""
    product_dtype: str = ""
    """`int8` or `fp8` if products have factors of 8 bits, which the probe measures; empty if
    weights are converted."""
    quantizing_slices: float | None = None
    """How many slices' bytes (`autotune.knobs.formats.SLICE_BYTES`) quantizing takes for a moment
    beside the layer; None if it does not work in slices and takes several times the layer."""
    storage_version: int = 1
    """Another one stores other numbers: embeddings that text encoders made with the one before
    are made again."""
    hides_dtype: bool = False
    """Whether weights show another dtype than products are computed in: what casts its
    activations to the dtype of a weight, as T5 does, would compute nonsense."""
    can_offload: bool = True
    """Whether weights can wait on the host and visit the device: all that belongs to them is in
    tensors."""
    is_tried_for_encoders: bool = False
    """Whether text encoders that do not fit otherwise are stored in it without being asked for."""

    @property
    def can_shard(self) -> bool:
        """Whether several processes can share its weights: FSDP2 takes plain tensors of one
        dtype."""
        return not self.quantize

    def meets(self, floor: Quality) -> bool:
        """Whether the quality floor admits it."""
        return get_args(Quality).index(self.quality) <= get_args(Quality).index(floor)


E = TypeVar("E", bound=Entry)


def by_name(*entries: E) -> Mapping[str, E]:
    """A table of entries."""
    return {entry.name: entry for entry in entries}
