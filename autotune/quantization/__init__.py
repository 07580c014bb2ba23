"""Frozen layers on quantized weights, and how weights become quantized as they arrive."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.quantization.frozen_linear import CONVERTS_AS_IT_READS
    from autotune.quantization.layers import quantize_inside
    from autotune.quantization.product_layer import PRODUCT_KERNELS, Kernels
    from autotune.quantization.sizes import CPU_SLICE_BYTES, NESTED_BLOCK, NF4_BLOCK, SLICE_BYTES
    from autotune.quantization.stored_rows import as_stored
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
