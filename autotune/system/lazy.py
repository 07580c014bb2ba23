"""torch and diffusers, imported when something of them is first used.

For modules that must not load them as they are imported, but use them in functions and annotations
(under `from __future__ import annotations`).
"""

from typing import TYPE_CHECKING, Any

from autotune.system.process import lazy_module

__all__ = ["Tensor", "diffusers", "nn", "torch"]

if TYPE_CHECKING:
    import diffusers
    import torch
    from torch import Tensor, nn
else:
    diffusers = lazy_module("diffusers")
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")
    Tensor = Any
