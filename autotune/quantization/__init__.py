"""Frozen layers on quantized weights, and how weights become quantized as they arrive."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.quantization.quantized_layers import (
        CONVERTS_AS_IT_READS,
        PRODUCT_KERNELS,
        Kernels,
        as_stored,
        quantize_inside,
    )
    from autotune.quantization.sizes import CPU_SLICE_BYTES, NESTED_BLOCK, NF4_BLOCK, SLICE_BYTES
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
