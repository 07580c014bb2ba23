"""Layers that are several in diffusers and one in their authors' code: put together, and taken
apart.

Several adapted layers become one by stacking: ranks add up, and `up` is block-diagonal, so the
update is the same.

diffusers' own converters (`diffusers.loaders.lora_conversion_utils`) are not used to read such
files: they multiply alpha into the matrices, which rounds in bf16, drop all but one of FLUX.1's
layers outside the blocks, and assert the published width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autotune.errors import InvalidInput
from autotune.weights.layer_names import Layout, split_number

MLP_RATIO = 4
"""Rows of FLUX.1's `proj_mlp` for each input."""


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


def join_layers(layers: Mapping[str, LoraLayer], layout: Layout) -> dict[str, LoraLayer]:
    """Layers under the authors' names, from layers under diffusers'.

    Raises InvalidInput for a layer without such a name.
    """
    joined: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        try:
            original = layout.original(name)
        except KeyError as error:
            message = f"{name} has no name in the code of the model's authors"
            raise InvalidInput(message, hint="choose the format diffusers") from error
        parts = layout.parts(original)
        if original not in joined:
            alone = len(parts) == 1
            joined[original] = (
                _turn(layer, original, layout)
                if alone
                else _join([layers.get(p) for p in parts], parts)
            )
    return joined


def split_layers(layers: Mapping[str, LoraLayer], layout: Layout) -> dict[str, LoraLayer]:
    """The inverse of `join_layers`; a layer that was trained as one gives each part its rows and
    all of `down`."""
    split: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        parts = layout.parts(name)
        split |= {parts[0]: _turn(layer, name, layout)} if len(parts) == 1 else _split(layer, parts)
    return split


def _turn(layer: LoraLayer, original: str, layout: Layout) -> LoraLayer:
    """The layer with the halves of its rows exchanged, if it is one of `layout.turned`."""
    is_turned = (
        split_number(original)[0] in layout.turned and len(layer.up) == 2 * layer.down.shape[1]
    )
    return replace(layer, up=layer.up.roll(layer.down.shape[1], 0)) if is_turned else layer


def _join(layers: list[LoraLayer | None], parts: list[str]) -> LoraLayer:
    """Stack layers, None for one that was not adapted.

    All get the rank of the largest, filled with zeros, by which a reader finds the parts again.
    """
    adapted = [layer for layer in layers if layer is not None]
    first, rank = adapted[0], max(layer.rank for layer in adapted)
    scale = first.alpha / first.rank
    downs, ups = [], []
    for layer, part in zip(layers, parts, strict=True):
        inputs = first.down.shape[1]
        down = first.down.new_zeros(rank, inputs)
        rows = (
            len(first.up)
            if len(parts) == 2
            else inputs * (MLP_RATIO if part.endswith("mlp") else 1)
        )
        up = first.up.new_zeros(rows, rank)
        if layer is not None:
            own = layer.alpha / layer.rank
            down[: layer.rank] = layer.down
            up[:, : layer.rank] = layer.up if own == scale else layer.up * (own / scale)
        downs.append(down)
        ups.append(up)
    up = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # torch's own
    return LoraLayer(torch.cat(downs), up, first.alpha * len(parts) * (rank / first.rank))


def _split(layer: LoraLayer, parts: list[str]) -> dict[str, LoraLayer]:
    width = len(layer.up) // len(parts) if len(parts) < 4 else layer.down.shape[1]
    sizes = [width] * min(3, len(parts)) + [len(layer.up) - 3 * width] * (len(parts) - 3)
    rows: tuple[Tensor, ...] = layer.up.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
    rank, rest = divmod(layer.rank, len(parts))
    blocks = [block.chunk(len(parts), dim=1) for block in rows] if rank and not rest else []
    if not blocks or any(
        block[j].any() for i, block in enumerate(blocks) for j in range(len(parts)) if i != j
    ):
        return {
            part: LoraLayer(layer.down, up.clone(), layer.alpha)
            for part, up in zip(parts, rows, strict=True)
        }
    split = {}
    for i, part in enumerate(parts):
        down, up = layer.down[i * rank : (i + 1) * rank], blocks[i][i]
        used = torch.logical_or(down.any(dim=1), up.any(dim=0))
        if used.any():  # else it was not adapted
            share = int(used.sum()) / rank
            split[part] = LoraLayer(down[used], up[:, used], layer.alpha / len(parts) * share)
    return split
