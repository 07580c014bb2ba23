"""What a family declares of its modulation layers, so that they can be computed ahead of the
steps that need them.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.runtime import lazy_module

if TYPE_CHECKING:
    from torch import nn
else:
    nn = lazy_module("torch.nn")


@dataclass(frozen=True)
class ModulationLayers:
    """Where a transformer turns what an item is conditioned on as a whole (its noise level, a
    pooled prompt, guidance) into the shifts, scales and gates of its blocks (AdaLN; Peebles and
    Xie 2023)."""

    owners: str
    """Regular expression for the names of modules that each have one `SiLU` and one `Linear`:
    the Linear, applied to the activated conditioning, is a modulation layer. Nothing else may
    use the conditioning."""
    embedders: tuple[str, ...]
    """Modules whose outputs (items, features) add up to the conditioning, in the order that they
    are called.
    """
    inputs: tuple[str, ...] = ()
    """Tensors of a sample that it depends on, besides noise level and guidance."""

    def layer_names(self, owner: str, module: "nn.Module") -> tuple[str, str]:
        """Names of the owner's activation and of its modulation layer."""
        kinds = {type(child): f"{owner}.{name}" for name, child in module.named_children()}
        return kinds[nn.SiLU], kinds[nn.Linear]

    def find(self, transformer: "nn.Module") -> list[tuple[str, str]]:
        """Names of every activation and its modulation layer."""
        owners = (
            (name, module)
            for name, module in transformer.named_modules()
            if re.fullmatch(self.owners, name)
        )
        return [self.layer_names(name, module) for name, module in owners]
