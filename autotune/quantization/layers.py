"""Quantizes the Linear layers inside a model's blocks as their weights arrive, one at a time."""

from collections.abc import Iterable
from pkgutil import resolve_name

from torch import nn

from autotune.backends import WEIGHT_FORMATS
from autotune.weights import Transform


def quantize_inside(blocks: Iterable[nn.Module], weight_format: str) -> Transform | None:
    """What to do with each module as its weights arrive: quantize it if it is a Linear inside
    `blocks`.

    One layer at a time, because quantizing needs several times its input's size for a moment. None
    for a format in which weights stay as they are.
    """
    name = WEIGHT_FORMATS[weight_format].quantize
    if not name:
        return None
    quantize_layer = resolve_name(name)
    linears = {
        id(layer) for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)
    }

    def quantize(name: str, module: nn.Module) -> nn.Module | None:
        return quantize_layer(module) if id(module) in linears else None

    return quantize
