"""The formats of frozen weights, and what is known of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from autotune.knobs.knob import Entry, Requirements
from autotune.plan.workload import Quality
from autotune.system.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class WeightFormat(Entry):
    """One way to store the weights of frozen Linear layers."""

    knob = "quantization"
    quality: Quality  # the strictest floor that admits it
    bytes_per_parameter: float  # scales included
    # `package.module:function` that gets each `torch.nn.Linear` when its weight has arrived. It
    # changes the layer in place, or returns another that peft adapts, with frozen parameters.
    quantize: str = ""
    # If `quantize` does not work on the meta device: makes a layer (with `cuda` or `cpu`) store,
    # keep and compute as much for the cost model's trace.
    stand_in: str = ""
    stored_dtype: str = ""  # torch's name of what is converted before each product, and probed
    product_dtype: str = ""  # `int8` or `fp8` if products have factors of 8 bits, which are probed
    quantizing_slices: float = 0.0  # slices' bytes that quantizing takes beside the layer
    storage_version: int = 1  # another makes embeddings of encoders anew
    # What casts activations to a weight's dtype, as T5, would compute nonsense.
    hides_dtype: bool = False
    can_offload: bool = True  # all that belongs to weights is in tensors
    is_tried_for_encoders: bool = False  # text encoders that do not fit otherwise

    @property
    def can_shard(self) -> bool:
        """FSDP2 takes plain tensors of one dtype."""
        return not self.quantize

    def meets(self, floor: Quality) -> bool:
        return get_args(Quality).index(self.quality) <= get_args(Quality).index(floor)


# Stored by torchao at first, and plain tensors now; keys of records stay comparable.
TORCHAO = Requirements(("cuda", "cpu"), library="torchao", min_version="0.18")
# 0.50 is the first whose kernels for CPUs were tried.
BNB_NF4 = Requirements(("cuda", "cpu"), (6, 0), "bitsandbytes", "0.45", min_version_on_cpu="0.50")
# For what surrounds the products.
EIGHT_BITS = Requirements(("cuda", "cpu"), (7, 5), compiles_on=("cuda",))


SLOW_FLOAT8 = (
    "a CPU has no float8 units: a layer took two to seven times fp32's time, with int8 half of it"
)


def _multiplied(
    name: str, torch_name: str, needs: Requirements, tolerance: float, why: str, how: str
) -> WeightFormat:
    dtype = name.partition("-")[0]
    return WeightFormat(
        name,
        f"{torch_name} weights and activations, {how}",
        needs,
        quality="compact",
        bytes_per_parameter=1.0,
        quantize=f"autotune.knobs.quantized_layers:multiply_in_{torch_name}",
        product_dtype=dtype,
        quantizing_slices=4,
        tolerance=tolerance,
        tolerance_reason=f"{why} for weights, activations and gradients",
        hides_dtype=True,
        slow_on_cpu=SLOW_FLOAT8 if dtype == "fp8" else "",
    )


# Errors of gradients, as measured on tiny models of all families: 1 to 2% of int8, 6 to 12% of the
# float8s, 22 to 38% of nf4; of Krea 2's 16 and 17% and 54%, Chroma's 62% of nf4. Of products in 8
# bits 2 to 5% and 7 to 16%; of Krea 2's 7 to 11% and 22 to 26%. Slices, as measured on CPUs: nf4
# 7.4, int8 and float8 with scales 4 in bf16, all 2 to 2.7 in fp32.
_ENTRIES = (
    WeightFormat("none", "weights stay as they are", quality="exact", bytes_per_parameter=2.0),
    WeightFormat(
        "torchao-int8",
        "weight-only int8",
        TORCHAO,
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.knobs.quantized_layers:quantize_int8",
        quantizing_slices=4,
        stored_dtype="int8",
        storage_version=2,
        tolerance=0.05,
        tolerance_reason="8 bits per row: weights are wrong by about 1%",
        is_tried_for_encoders=True,  # T5 casts to the dtype of a weight unless that is int8
    ),
    WeightFormat(
        "torchao-fp8",
        "weight-only float8",
        TORCHAO,
        quality="high",
        bytes_per_parameter=1.0,
        quantize="autotune.knobs.quantized_layers:quantize_float8",
        quantizing_slices=4,
        stored_dtype="float8_e4m3fn",
        storage_version=2,
        tolerance=0.2,
        tolerance_reason="3 bits of mantissa: weights are wrong by about 3%",
        hides_dtype=True,
    ),
    _multiplied(
        "int8-rotated", "int8", EIGHT_BITS, 0.08, "8 bits per row", "rotated and multiplied"
    ),
    _multiplied(
        "fp8-matmul",
        "float8",
        replace(EIGHT_BITS, compute_capability=(8, 9)),
        0.3,
        "3 bits of mantissa",
        "multiplied as they are",
    ),
    WeightFormat(
        "bnb-nf4",
        "4-bit NormalFloat",
        BNB_NF4,
        quality="compact",
        bytes_per_parameter=0.52,  # half a byte, and doubly quantized scales of 64 values each
        quantize="autotune.knobs.quantized_layers:quantize_nf4",
        stand_in="autotune.cost.kernels:stand_in_for_nf4",
        quantizing_slices=8,
        stored_dtype="uint8",
        tolerance=0.7,
        tolerance_reason="4 bits: weights are wrong by about 10%",
        hides_dtype=True,
        can_offload=False,
        is_tried_for_encoders=True,
    ),
)
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in _ENTRIES}


NF4_BLOCK = 64  # weights per absolute maximum
NESTED_BLOCK = 256  # absolute maxima per fp32 scale of theirs, with double quantization

SLICE_BYTES = 32 << 20
# Of a weight to quantize at a time: it stays in a CPU's caches; on a GPU it would be launches.
CPU_SLICE_BYTES = 1 << 20


def slice_bytes_of(weight: "Tensor") -> int:
    """Return how many bytes of `weight` to quantize at a time."""
    return CPU_SLICE_BYTES if weight.is_cpu else SLICE_BYTES
