"""The attention backends and weight formats that autotune knows, one entry each. Every room reads
these tables.

Entries are data: functions that need torch are named, as `package.module:function`, and looked up
when first used. So this module imports no torch.

Plans name entries by plain strings, so a plan of an autotune with more entries still parses.
"""

from autotune.backends.attention import (
    ATTENTION_BACKENDS,
    assumed_efficiency,
    cuda_kernel,
    prefers_cudnn,
    token_multiple,
)
from autotune.backends.entries import (
    AttentionBackend,
    Entry,
    Kernel,
    Library,
    Requirements,
    WeightFormat,
    load_entry_points,
)
from autotune.backends.weight_formats import WEIGHT_FORMATS

__all__ = [
    "ATTENTION_BACKENDS",
    "WEIGHT_FORMATS",
    "AttentionBackend",
    "Entry",
    "Kernel",
    "Library",
    "Requirements",
    "WeightFormat",
    "assumed_efficiency",
    "cuda_kernel",
    "load_entry_points",
    "prefers_cudnn",
    "token_multiple",
]
