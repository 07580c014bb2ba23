"""torch and diffusers, imported when something of them is first used.

For modules that checks reach without torch: families and what they use (their facts and their code
are one file each), rules of settings, and headers of weights, caches and pictures. Annotations stay
text there (`from __future__ import annotations`).
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.system.process import collect_rarely

__all__ = ["LazyModule", "Tensor", "diffusers", "nn", "torch"]


class LazyModule(ModuleType):
    """A stand-in for a library that imports it when something of it is first used."""

    def __getattr__(self, name: str) -> object:
        if "_module" not in self.__dict__:
            with collect_rarely():  # another thread that imports it is waited for
                self._module = importlib.import_module(self.__name__)
        return getattr(self._module, name)


if TYPE_CHECKING:
    import diffusers
    import torch
    from torch import Tensor, nn
else:
    diffusers = LazyModule("diffusers")
    torch = LazyModule("torch")
    nn = LazyModule("torch.nn")
    Tensor = Any
