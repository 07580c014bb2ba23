"""FLUX.1's layers as its authors named them, which ComfyUI and kohya's scripts expect: q, k and v are one layer there.

Several adapted layers become one by stacking: ranks add up, and `up` is block-diagonal, so the update is the same. The
names are those of diffusers' `scripts/convert_flux_to_diffusers.py`; the parts of a joined layer are in the order of
its rows there. `norm_out` is left out: its rows are in another order.

diffusers' own converters (`diffusers.loaders.lora_conversion_utils`) are not used to read such files: they multiply
alpha into the matrices, which rounds in bf16, drop all but one of the layers outside the blocks, and assert the
published width.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autotune.errors import InvalidInput
from autotune.weights.lora_layer import LoraLayer

DOUBLE_BLOCK: Mapping[str, tuple[str, ...]] = {
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
SINGLE_BLOCK: Mapping[str, tuple[str, ...]] = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
PARTS_OF: Mapping[str, tuple[str, ...]] = {
    **{f"double_blocks.#.{k}": tuple(f"transformer_blocks.#.{part}" for part in v) for k, v in DOUBLE_BLOCK.items()},
    **{
        f"single_blocks.#.{k}": tuple(f"single_transformer_blocks.#.{part}" for part in v)
        for k, v in SINGLE_BLOCK.items()
    },
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
}
"""diffusers' layers in each layer of the authors; # stands for the number of a block."""

ORIGINAL_OF = {part: original for original, parts in PARTS_OF.items() for part in parts}
ORIGINAL_OF_KOHYA = {original.replace(".", "_"): original for original in PARTS_OF}
BLOCK_NUMBER = re.compile(r"(?<=blocks[._])\d+(?=[._])")

FLUX_CLASS = "FluxTransformer2DModel"
"""The model's class in diffusers."""
NUM_DOUBLE_BLOCKS = 19
"""In the published model, by its configuration."""
MLP_RATIO = 4
"""Rows of `proj_mlp` for each input."""


def is_flux(modules: Iterable[str]) -> bool | None:
    """Whether names are diffusers' of FLUX.1, which its single blocks prove; None if they may be.

    Stable Diffusion 3 has all names of the double blocks, Qwen-Image those of their attention, in layers as wide.
    """
    names = tuple(modules)
    if any(name.startswith("single_transformer_blocks.") for name in names):
        return True
    in_blocks = [_split_number(name) for name in names if re.match(r"transformer_blocks\.\d+\.", name)]
    if not in_blocks or any(int(number) >= NUM_DOUBLE_BLOCKS or key not in ORIGINAL_OF for key, number in in_blocks):
        return False
    return None


def has_original_names(modules: Iterable[str]) -> bool:
    """Whether names are the authors', with dots or kohya's underscores."""
    return any(re.match(r"(double|single)_blocks[._]\d", name) for name in modules)


def restore_original_names(kohya_names: Iterable[str]) -> list[str]:
    """The authors' names for those of `kohya_names`, which have underscores for dots, that are FLUX's."""
    keys = [_split_number(name) for name in kohya_names]
    return [ORIGINAL_OF_KOHYA[key].replace("#", number) for key, number in keys if key in ORIGINAL_OF_KOHYA]


def join_layers(layers: Mapping[str, LoraLayer]) -> dict[str, LoraLayer]:
    """Layers under the authors' names, from layers under diffusers'.

    Raises InvalidInput for a layer without such a name.
    """
    joined: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        key, number = _split_number(name)
        if key not in ORIGINAL_OF:
            raise InvalidInput(f"{name} has no name in the original FLUX", hint="choose the format diffusers")
        original = ORIGINAL_OF[key].replace("#", number)
        parts = [part.replace("#", number) for part in PARTS_OF[ORIGINAL_OF[key]]]
        if original not in joined:
            joined[original] = layer if len(parts) == 1 else _join([layers.get(part) for part in parts], parts)
    return joined


def split_layers(layers: Mapping[str, LoraLayer]) -> dict[str, LoraLayer]:
    """The inverse of `join_layers`; a layer that was trained as one gives each part its rows and all of `down`.

    Raises InvalidInput for a name that FLUX does not have.
    """
    split: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        key, number = _split_number(name)
        if key not in PARTS_OF:
            raise InvalidInput(f"{name} is no layer of FLUX", hint="is it an adapter of FLUX.1? Export it again")
        parts = [part.replace("#", number) for part in PARTS_OF[key]]
        split |= {parts[0]: layer} if len(parts) == 1 else _split(layer, parts)
    return split


def _split_number(name: str) -> tuple[str, str]:
    """A name with # for the number of its block, and that number, empty outside the blocks."""
    number = BLOCK_NUMBER.search(name)
    return (BLOCK_NUMBER.sub("#", name, count=1), number[0]) if number else (name, "")


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
        up = first.up.new_zeros(inputs * (MLP_RATIO if part.endswith("mlp") else 1), rank)
        if layer is not None:
            own = layer.alpha / layer.rank
            down[: layer.rank] = layer.down
            up[:, : layer.rank] = layer.up if own == scale else layer.up * (own / scale)
        downs.append(down)
        ups.append(up)
    up = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # torch's own
    return LoraLayer(torch.cat(downs), up, first.alpha * len(parts) * (rank / first.rank))


def _split(layer: LoraLayer, parts: list[str]) -> dict[str, LoraLayer]:
    width = len(layer.up) // 3 if len(parts) == 3 else layer.down.shape[1]
    sizes = [width] * 3 + [len(layer.up) - 3 * width] * (len(parts) - 3)
    rows: tuple[Tensor, ...] = layer.up.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
    rank, rest = divmod(layer.rank, len(parts))
    blocks = [block.chunk(len(parts), dim=1) for block in rows] if rank and not rest else []
    if not blocks or any(block[j].any() for i, block in enumerate(blocks) for j in range(len(parts)) if i != j):
        return {part: LoraLayer(layer.down, up.clone(), layer.alpha) for part, up in zip(parts, rows, strict=True)}
    split = {}
    for i, part in enumerate(parts):
        down, up = layer.down[i * rank : (i + 1) * rank], blocks[i][i]
        used = torch.logical_or(down.any(dim=1), up.any(dim=0))
        if used.any():  # else it was not adapted
            share = int(used.sum()) / rank
            split[part] = LoraLayer(down[used], up[:, used], layer.alpha / len(parts) * share)
    return split
