"""One adapted module's low-rank update."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoraLayer:
    """The two matrices of one adapted module; its update is `up @ down * alpha / rank`."""

    down: Tensor
    """(rank, inputs)"""
    up: Tensor
    """(outputs, rank)"""
    alpha: float
    magnitude: Tensor | None = None
    """(outputs,) norms of DoRA; None of a LoRA."""

    @property
    def rank(self) -> int:
        """Inner dimension of the two matrices."""
        return int(self.down.shape[0])
