"""The weight formats that frozen layers can be stored in. Plain tables that every room reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.schema import Quality


@dataclass(frozen=True)
class WeightFormat:
    """One way to store frozen weights."""

    quality: Quality
    """The strictest floor that admits it."""
    bytes_per_parameter: float
    """With its scales."""
    tolerance: float = 0.0
    """Of gradients with random weights, relative to unquantized ones'; 0 where nothing is quantized."""
    because: str = ""
    """Where that error comes from."""
    library: Literal["torchao", "bitsandbytes"] | None = None
    """Whose tensors hold the weights; None for torch's own."""
    config: str = ""
    """Name of the class that tells torchao how."""


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "none": WeightFormat("exact", 2.0),
    "torchao-int8": WeightFormat(
        "high", 1.0, 0.05, "8 bits per row: weights are wrong by about 1%", "torchao", "Int8WeightOnlyConfig"
    ),
    "torchao-fp8": WeightFormat(
        "high", 1.0, 0.12, "3 bits of mantissa: weights are wrong by about 3%", "torchao", "Float8WeightOnlyConfig"
    ),
    "layerwise-fp8": WeightFormat(
        "high", 1.0, 0.15, "3 bits of mantissa and no scales: weights are wrong by 3%, small ones by more"
    ),
    "bnb-int8": WeightFormat(
        "high", 1.0, 0.08, "8 bits for weights and, in the forward pass, for activations", "bitsandbytes"
    ),
    "bnb-nf4": WeightFormat("compact", 0.52, 0.5, "4 bits: weights are wrong by about 10%", "bitsandbytes"),
}
"""By name. nf4: half a byte, and doubly quantized scales of 64 values each. Errors of gradients, as measured on tiny
models of all families: 1 to 2% of int8, 6 to 11% and 6 to 12% of the float8s, 22 to 38% of nf4, by weights alone."""

LAYERWISE = "layerwise-fp8"
