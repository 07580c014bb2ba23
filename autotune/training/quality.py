"""How far quantized layers are from the real weights: measured on each layer as it arrives, judged by the floor.

Each Linear gets the same random inputs before and after; the error is |after - before| / |before| of its outputs
without bias, over all Linears of a block together. The whole model's may differ: layers follow each other.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from autotune.errors import AutotuneError
from autotune.schema import Quality, QuantizationError

if TYPE_CHECKING:
    from autotune.weights import Transform

LIMITS: Mapping[Quality, float] = {"exact": 0.0, "high": 0.05, "compact": 0.15}
"""Largest error of a block. Of weights drawn from normal, Laplace and Student's t (5 degrees) distributions, 2048 x
3072, int8 with a scale per row leaves 0.9 to 1.9%, float8 (e4m3) 2.6%, nf4 in blocks of 64 values 9.2 to 10.4%: so a
block above its limit has outliers that its storage cannot hold."""

NUM_INPUTS = 32


class QualityMissed(AutotuneError):
    """Quantized weights are further from the real ones than the quality floor allows."""


class ErrorMeter:
    """Compares each layer with itself around a transform that quantizes it."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._block_of = {id(layer): number for number, block in enumerate(blocks) for layer in block.modules()}
        self._sums: dict[int, tuple[float, float]] = {}

    def around(self, transform: "Transform") -> "Transform":
        """The same transform, watched."""

        def watched(name: str, module: nn.Module) -> nn.Module | None:
            block = self._block_of.get(id(module))
            if block is None or not isinstance(module, nn.Linear):
                return transform(name, module)
            inputs = _inputs(module)
            before = _outputs(module, inputs)
            replacement = transform(name, module)
            if type(replacement or module) is not nn.Linear:
                self._add(block, before, _outputs(replacement or module, inputs))
            return replacement

        return watched

    def _add(self, block: int, before: torch.Tensor, after: torch.Tensor) -> None:
        wrong, whole = self._sums.get(block, (0.0, 0.0))
        difference = (after.double() - before.double()).square().sum().item()
        self._sums[block] = wrong + difference, whole + before.double().square().sum().item()

    def result(self) -> QuantizationError | None:
        """None where nothing was quantized. Errors that are not numbers count as 1."""
        if not self._sums:
            return None
        errors = {block: _ratio(*sums) for block, sums in self._sums.items()}
        worst = max(errors, key=lambda block: errors[block])
        total = _ratio(*(sum(column) for column in zip(*self._sums.values(), strict=True)))
        return QuantizationError(overall=total, worst=errors[worst], worst_block=worst)


def require_quality(error: QuantizationError | None, quality: Quality, storage: str) -> None:
    """Raise QualityMissed where a block is further off than the floor allows."""
    if error is not None and error.worst > LIMITS[quality]:
        raise QualityMissed(
            f"stored as {storage}, block {error.worst_block} of this model is {error.worst:.1%} off its real outputs; "
            f"--quality {quality} allows {LIMITS[quality]:.0%}",
            hint=f"make the plan again with --exclude quantization={storage}",
        )


def _ratio(wrong: float, whole: float) -> float:
    error = (wrong / whole) ** 0.5 if whole > 0 else float(wrong > 0)
    return error if error < 1 else 1.0  # NaN too


def _inputs(layer: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer.in_features)
    return torch.randn(NUM_INPUTS, layer.in_features, generator=generator).to(layer.weight.device, layer.weight.dtype)


@torch.no_grad()
def _outputs(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = layer(inputs)
    bias = layer.bias
    return outputs.float() if bias is None else outputs.float() - bias.float()  # type: ignore[operator]
