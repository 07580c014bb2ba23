"""The error of quantization: measured on each layer as it loads, and compared with the quality
floor.

Each Linear gets the same random inputs before and after; the error is |after - before| / |before|
of its outputs without bias, over all Linears of a block together. The whole model's error may
differ, since layers are chained.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autotune.errors import AutotuneError
from autotune.plan.trial import QuantizationError
from autotune.plan.workload import Quality
from autotune.weights.stream import Transform

MAX_BLOCK_ERROR: Mapping[Quality, float] = {"exact": 0.0, "high": 0.05, "compact": 0.15}
"""Maximum error of a block. For weights of 2048 x 3072 drawn from normal, Laplace and Student's
t (5 degrees) distributions, int8 with a scale per row has an error of 0.9 to 1.9%, float8 (e4m3)
2.6%, nf4 in blocks of 64 values 9.2 to 10.4%: so a block above its limit has outliers that its
weight format cannot represent."""

NUM_INPUTS = 32


class QualityMissed(AutotuneError):
    """Quantization changes the weights by more than the quality floor allows."""


class ErrorMeter:
    """Compares each layer before and after a transform that quantizes it."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._block_of = {
            id(layer): number for number, block in enumerate(blocks) for layer in block.modules()
        }
        self._sums: dict[int, tuple[float, float]] = {}

    def wrap(self, transform: Transform) -> Transform:
        """The same transform, with its error measured."""

        def measure(name: str, module: nn.Module) -> nn.Module | None:
            block = self._block_of.get(id(module))
            if block is None or not isinstance(module, nn.Linear):
                return transform(name, module)
            inputs = _inputs(module)
            before = _outputs(module, inputs)
            replacement = transform(name, module)
            if type(replacement or module) is not nn.Linear:
                self._add(block, before, _outputs(replacement or module, inputs))
            return replacement

        return measure

    def _add(self, block: int, before: torch.Tensor, after: torch.Tensor) -> None:
        error, norm = self._sums.get(block, (0.0, 0.0))
        difference = (after.double() - before.double()).square().sum().item()
        self._sums[block] = error + difference, norm + before.double().square().sum().item()

    def result(self) -> QuantizationError | None:
        """The error of all blocks and of the worst; None if nothing was quantized. NaN counts as
        1."""
        if not self._sums:
            return None
        errors = {block: _ratio(*sums) for block, sums in self._sums.items()}
        worst = max(errors, key=lambda block: errors[block])
        total = _ratio(*(sum(column) for column in zip(*self._sums.values(), strict=True)))
        return QuantizationError(overall=total, worst=errors[worst], worst_block=worst)


def require_quality(error: QuantizationError | None, quality: Quality, quantization: str) -> None:
    """Raise QualityMissed if the error of a block is above the quality floor's limit."""
    if error is not None and error.worst > MAX_BLOCK_ERROR[quality]:
        raise QualityMissed(
            f"quantized as {quantization}, block {error.worst_block} of this model is "
            f"{error.worst:.1%} off its real "
            f"outputs; --quality {quality} allows {MAX_BLOCK_ERROR[quality]:.0%}",
            hint=f"make the plan again with --exclude quantization={quantization}",
        )


def _ratio(squared_error: float, squared_norm: float) -> float:
    error = (squared_error / squared_norm) ** 0.5 if squared_norm > 0 else float(squared_error > 0)
    return error if error < 1 else 1.0  # NaN too


def _inputs(layer: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer.in_features)
    return torch.randn(NUM_INPUTS, layer.in_features, generator=generator).to(
        layer.weight.device, layer.weight.dtype
    )


@torch.no_grad()
def _outputs(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = layer(inputs)
    bias = layer.bias
    return outputs.float() if bias is None else outputs.float() - bias.float()  # type: ignore[operator]
