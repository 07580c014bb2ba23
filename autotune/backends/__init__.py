"""The attention backends and weight formats that autotune knows, one entry each. Every room reads
these tables.

Entries are data: functions that need torch are named, as `package.module:function`, and looked up
when first used. So this module imports no torch, and neither should a module that defines an entry.
Other distributions add entries by entry points, which every process of autotune finds, a trial's
too:

    [project.entry-points."autotune.backends"]
    my-attention = "my_package.entries:MY_ATTENTION"

Plans name entries by plain strings, so a plan from a machine with more entries than this one has
still parses.
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
    Registry,
    Requirements,
    WeightFormat,
    load_entry_points,
    register,
)
from autotune.backends.weight_formats import WEIGHT_FORMATS

__all__ = [
    "ATTENTION_BACKENDS",
    "WEIGHT_FORMATS",
    "AttentionBackend",
    "Entry",
    "Kernel",
    "Library",
    "Registry",
    "Requirements",
    "WeightFormat",
    "assumed_efficiency",
    "cuda_kernel",
    "load_entry_points",
    "prefers_cudnn",
    "register",
    "token_multiple",
]
