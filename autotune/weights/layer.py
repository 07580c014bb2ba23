"""One adapted module's low-rank update."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """The two matrices of one adapted module; its update is `up @ down * alpha / rank`."""

    down: "Tensor"
    """(rank, inputs)"""
    up: "Tensor"
    """(outputs, rank)"""
    alpha: float

    @property
    def rank(self) -> int:
        """Inner dimension."""
        return int(self.down.shape[0])
