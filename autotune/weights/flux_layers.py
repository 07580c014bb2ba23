"""FLUX.1's layers as its authors named them, which ComfyUI and kohya's scripts expect: q, k and v are one layer there.

Several adapted layers become one by stacking: ranks add up, and `up` is block-diagonal, so the update is the same. The
correspondence of names is that of diffusers' `scripts/convert_flux_to_diffusers.py`; the order inside a joined layer
is that of its rows there. `norm_out` is left out: its rows are in another order.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.weights.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

DOUBLE: Mapping[str, tuple[str, ...]] = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
}
SINGLE: Mapping[str, tuple[str, ...]] = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
OUTSIDE: Mapping[str, str] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
BLOCKS = (("double_blocks", "transformer_blocks", DOUBLE), ("single_blocks", "single_transformer_blocks", SINGLE))
FLUX_CLASS = "FluxTransformer2DModel"
"""The model's class in diffusers."""
NUM_DOUBLE_BLOCKS = 19
"""In the published model, by its configuration."""
MLP_RATIO = 4
"""Rows of `proj_mlp` for each input."""


def is_flux(modules: Iterable[str]) -> bool | None:
    """Whether names are diffusers' of FLUX.1, which its single blocks tell; None where they may be.

    Stable Diffusion 3 has all names of the double blocks, Qwen-Image those of their attention, in as wide layers.
    """
    names = tuple(modules)
    if any(name.startswith("single_transformer_blocks.") for name in names):
        return True
    in_blocks = [found for name in names if (found := re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name))]
    parts = {part for known in DOUBLE.values() for part in known}
    if not in_blocks or any(int(found[1]) >= NUM_DOUBLE_BLOCKS or found[2] not in parts for found in in_blocks):
        return False
    return None


def is_original_flux(modules: Iterable[str]) -> bool:
    """Whether names are the authors', with dots or kohya's underscores."""
    return any(re.match(r"(double|single)_blocks[._]\d", name) for name in modules)


def original_names(kohya_names: Iterable[str]) -> list[str]:
    """The authors' names behind those of `kohya_names` (underscores for dots) that are FLUX's."""
    leaves = {leaf.replace(".", "_"): leaf for _, _, table in BLOCKS for leaf in table}
    outside = {name.replace(".", "_"): name for name in OUTSIDE}
    names = []
    for name in kohya_names:
        found = re.fullmatch(r"((?:double|single)_blocks)_(\d+)_(.+)", name)
        if found and found[3] in leaves:
            names.append(f"{found[1]}.{found[2]}.{leaves[found[3]]}")
        elif name in outside:
            names.append(outside[name])
    return names


def join_layers(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """Layers under the authors' names, from layers under diffusers'.

    Raises InvalidInput for a layer without such a name.
    """
    joined: dict[str, Layer] = {}
    for name in layers:
        original, parts = _joined_name(name)
        if original not in joined:
            found = [layers.get(part) for part in parts]
            joined[original] = layers[name] if len(parts) == 1 else _join(found, parts)
    return joined


def split_layers(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """The reverse of `join_layers`; a layer that was trained as one gives each part its rows and all of `down`.

    Raises InvalidInput for a name that FLUX does not have.
    """
    split: dict[str, Layer] = {}
    for name, layer in layers.items():
        parts = _parts(name)
        split |= {parts[0]: layer} if len(parts) == 1 else _split(layer, parts)
    return split


def _joined_name(name: str) -> tuple[str, tuple[str, ...]]:
    """The authors' name of the layer that `name` is in, and diffusers' names of all in it."""
    for original, theirs, table in BLOCKS:
        found = re.fullmatch(rf"{theirs}\.(\d+)\.(.+)", name)
        for leaf, parts in table.items():
            if found and found[2] in parts:
                return f"{original}.{found[1]}.{leaf}", tuple(f"{theirs}.{found[1]}.{part}" for part in parts)
    for original, theirs in OUTSIDE.items():
        if theirs == name:
            return original, (name,)
    raise InvalidInput(f"{name} has no name in the original FLUX", hint="choose the format diffusers")


def _parts(name: str) -> tuple[str, ...]:
    for original, theirs, table in BLOCKS:
        found = re.fullmatch(rf"{original}\.(\d+)\.(.+)", name)
        if found and found[2] in table:
            return tuple(f"{theirs}.{found[1]}.{part}" for part in table[found[2]])
    if name in OUTSIDE:
        return (OUTSIDE[name],)
    raise InvalidInput(f"{name} is no layer of FLUX", hint="is it an adapter of FLUX.1? Export it again")


def _join(found: list[Layer | None], parts: tuple[str, ...]) -> Layer:
    """Block-diagonal, with equal ranks (the smaller are filled with zeros) by which readers know the parts again."""
    import torch

    present = [layer for layer in found if layer is not None]
    first, rank = present[0], max(layer.rank for layer in present)
    scale = first.alpha / first.rank
    downs, ups = [], []
    for layer, part in zip(found, parts, strict=True):
        inputs = first.down.shape[1]
        down = first.down.new_zeros(rank, inputs)
        up = first.up.new_zeros(inputs * (MLP_RATIO if part.endswith("mlp") else 1), rank)
        if layer is not None:
            own = layer.alpha / layer.rank
            down[: layer.rank] = layer.down
            up[:, : layer.rank] = layer.up if own == scale else layer.up * (own / scale)
        downs.append(down)
        ups.append(up)
    up = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # torch's own
    return Layer(torch.cat(downs), up, first.alpha * len(parts) * (rank / first.rank))


def _split(layer: Layer, parts: tuple[str, ...]) -> dict[str, Layer]:
    import torch

    width = len(layer.up) // 3 if len(parts) == 3 else layer.down.shape[1]
    sizes = [width] * 3 + [len(layer.up) - 3 * width] * (len(parts) - 3)
    rows: tuple[Tensor, ...] = layer.up.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
    rank, rest = divmod(layer.rank, len(parts))
    blocks = [block.chunk(len(parts), dim=1) for block in rows] if rank and not rest else []
    if not blocks or any(block[j].any() for i, block in enumerate(blocks) for j in range(len(parts)) if i != j):
        return {part: Layer(layer.down, up.clone(), layer.alpha) for part, up in zip(parts, rows, strict=True)}
    split = {}
    for i, part in enumerate(parts):
        down, up = layer.down[i * rank : (i + 1) * rank], blocks[i][i]
        used = torch.logical_or(down.any(dim=1), up.any(dim=0))
        if used.any():  # else it was not adapted
            share = int(used.sum()) / rank
            split[part] = Layer(down[used], up[:, used], layer.alpha / len(parts) * share)
    return split
