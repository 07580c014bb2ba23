"""torch and diffusers, imported when something of them is first used.

For modules that checks reach without torch: families and what they use (their facts and their code
are one file each), rules of settings, and headers of weights, caches and pictures. Annotations stay
text there (`from __future__ import annotations`).
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.system.process import collect_rarely

__all__ = ["Tensor", "diffusers", "lazy_module", "nn", "torch"]


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        if "_module" not in self.__dict__:
            with collect_rarely():  # another thread that imports it is waited for
                self._module = importlib.import_module(self.__name__)
        return getattr(self._module, name)


def lazy_module(name: str) -> ModuleType:
    """Return a stand-in for a library that imports it when something of it is first used."""
    return _LazyModule(name)


if TYPE_CHECKING:
    import diffusers
    import torch
    from torch import Tensor, nn
else:
    diffusers = lazy_module("diffusers")
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")
    Tensor = Any
