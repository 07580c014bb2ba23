"""The names of layers in ComfyUI and kohya's scripts: those of the models' authors.

A layer of the authors may be several of diffusers, in the order of its rows. Both programs' own
sources, with commits, are in `tests/clients`, which these tables are tested against.
FLUX's `norm_out` is left out: its rows are in another order there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from autotune.errors import InvalidInput
from autotune.plan.job import AdapterFormat
from autotune.system.lazy import Tensor, torch

Parts = tuple[str, ...]
BLOCK = re.compile(  # the number of a repeated block; of a UNet, of a repeated block within a stage
    r"(^blocks|(?:transformer|double|single|joint|layerwise|refiner)_blocks)([._])(\d+)(?=[._])"
)


@dataclass(frozen=True)
class Layout:
    """One model's layers under both names; # stands for the number of a block."""

    parts_of: Mapping[str, Parts]  # diffusers' layers in each layer of the authors
    width_ratios: Mapping[str, int]  # outputs for each input, which tell models of like names apart
    # Layers that, with two rows for each input, make shifts before scales, diffusers' after.
    swapped: frozenset[str] = frozenset()
    kohya_has_own_names: bool = True  # of the authors, as ComfyUI always

    @cached_property
    def original_of(self) -> dict[str, str]:
        return {part: original for original, parts in self.parts_of.items() for part in parts}

    def parts(self, original: str) -> list[str]:
        """List diffusers' layers in one of the authors', else raise KeyError."""
        key, number = split_number(original)
        return [part.replace("#", number) for part in self.parts_of[key]]

    def original(self, layer: str) -> str:
        key, number = split_number(layer)
        return self.original_of[key].replace("#", number)

    def has_originals(self, names: Iterable[str]) -> bool:
        return all(split_number(name)[0] in self.parts_of for name in names)

    def has_layers(self, names: Iterable[str]) -> bool:
        return all(split_number(name)[0] in self.original_of for name in names)

    def has_widths(self, widths: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether a layer has the outputs that this model's has."""
        for name, (inputs, outputs) in widths.items():
            ratio = self.width_ratios.get(split_number(name)[0].partition("#.")[2], 0)
            if outputs == inputs * ratio:
                return True
        return False


def split_number(name: str) -> tuple[str, str]:
    """Split a name into one with # for its block's number, and that number or ''."""
    number = BLOCK.search(name)
    return (BLOCK.sub(r"\1\2#", name, count=1), number[3]) if number else (name, "")


def _within(places: Mapping[str, str], layers: Mapping[str, Parts]) -> dict[str, Parts]:
    return {
        f"{original}.{layer}": tuple(f"{place}.{part}" for part in parts)
        for original, place in places.items()
        for layer, parts in layers.items()
    }


def _same(*layers: str) -> dict[str, Parts]:
    return {layer: (layer,) for layer in layers}


def _one(**names: str) -> dict[str, Parts]:
    return {original.replace("__", "."): (name,) for original, name in names.items()}


def _embedder(
    original: str, name: str, layers: tuple[object, object] = ("in_layer", "out_layer")
) -> dict[str, Parts]:
    first, second = layers
    return {
        f"{original}.{first}": (f"{name}.linear_1",),
        f"{original}.{second}": (f"{name}.linear_2",),
    }


def _feed_forward(first: str, last: str) -> dict[str, Parts]:
    return {
        "img_mlp.0": (f"ff.{first}",),
        "img_mlp.2": (f"ff.{last}",),
        "txt_mlp.0": (f"ff_context.{first}",),
        "txt_mlp.2": (f"ff_context.{last}",),
    }


FLUX_ATTENTION: dict[str, Parts] = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
}
DOUBLE = {"double_blocks.#": "transformer_blocks.#"}
SINGLE = {"single_blocks.#": "single_transformer_blocks.#"}
CHROMA: Mapping[str, Parts] = {
    **_within(DOUBLE, FLUX_ATTENTION | _feed_forward("net.0.proj", "net.2")),
    **_within(
        SINGLE,
        {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear2": ("proj_out",)},
    ),
    **_one(img_in="x_embedder", txt_in="context_embedder", final_layer__linear="proj_out"),
}
"""Those of FLUX.1 but its modulation and embedders; nobody adapts what Chroma has instead."""
FLUX1: Mapping[str, Parts] = {
    **CHROMA,
    **_within(DOUBLE, {"img_mod.lin": ("norm1.linear",), "txt_mod.lin": ("norm1_context.linear",)}),
    **_within(SINGLE, {"modulation.lin": ("norm.linear",)}),
    **_embedder("time_in", "time_text_embed.timestep_embedder"),
    **_embedder("vector_in", "time_text_embed.text_embedder"),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder"),
}
FLUX2: Mapping[str, Parts] = {
    **_within(DOUBLE, FLUX_ATTENTION | _feed_forward("linear_in", "linear_out")),
    **_within(SINGLE, {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}),
    **_embedder("time_in", "time_guidance_embed.timestep_embedder"),
    **_one(
        img_in="x_embedder",
        txt_in="context_embedder",
        final_layer__linear="proj_out",
        double_stream_modulation_img__lin="double_stream_modulation_img.linear",
        double_stream_modulation_txt__lin="double_stream_modulation_txt.linear",
        single_stream_modulation__lin="single_stream_modulation.linear",
    ),
}
# Two rows of its gated feed-forward part, thrice as wide as the model, where FLUX.1 has four.
FLUX2_RATIOS = {"img_mlp.0": 6, "txt_mlp.0": 6, "linear1": 9}

WAN: Mapping[str, Parts] = {
    **{
        f"blocks.#.{original}.{letter}": (f"blocks.#.{attention}.to_{part}",)
        for original, attention in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for letter, part in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out.0"))
    },
    "blocks.#.ffn.0": ("blocks.#.ffn.net.0.proj",),
    "blocks.#.ffn.2": ("blocks.#.ffn.net.2",),
    **_embedder("time_embedding", "condition_embedder.time_embedder", (0, 2)),
    **_embedder("text_embedding", "condition_embedder.text_embedder", (0, 2)),
    **_one(time_projection__1="condition_embedder.time_proj", head__head="proj_out"),
}
KREA2: Mapping[str, Parts] = {
    **_within(
        {
            "blocks.#": "transformer_blocks.#",
            "txtfusion.layerwise_blocks.#": "text_fusion.layerwise_blocks.#",
            "txtfusion.refiner_blocks.#": "text_fusion.refiner_blocks.#",
        },
        {
            **{f"attn.w{letter}": (f"attn.to_{letter}",) for letter in "qkv"},
            "attn.wo": ("attn.to_out.0",),
            "attn.gate": ("attn.to_gate",),
            **{f"mlp.{name}": (f"ff.{name}",) for name in ("gate", "up", "down")},
        },
    ),
    **_embedder("tmlp", "time_embed", (0, 2)),
    **_embedder("txtmlp", "txt_in", (1, 3)),
    **_one(
        first="img_in",
        tproj__1="time_mod_proj",
        txtfusion__projector="text_fusion.projector",
        last__linear="final_layer.linear",
    ),
}

QWEN_21: Mapping[str, Parts] = {
    **_within(
        {"transformer_blocks.#": "transformer_blocks.#"},
        {
            **_same("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
            "img_mlp.gate_up": ("img_mlp.gate_layer", "img_mlp.proj"),
            "img_mlp.out": ("img_mlp.out",),
        },
    ),
    **_same(
        "img_in",
        "txt_in.in_layer",
        "txt_in.out_layer",
        "time_text_embed.timestep_embedder.linear_1",
        "time_text_embed.timestep_embedder.linear_2",
        "modulation.1",
        "norm_out.linear",
        "proj_out",
    ),
}

UNET_TRANSFORMERS = {
    **{
        f"input_blocks.{3 * stage + 1 + i}.1": f"down_blocks.{stage}.attentions.{i}"
        for stage in (1, 2)
        for i in (0, 1)
    },
    "middle_block.1": "mid_block.attentions.0",
    **{
        f"output_blocks.{3 * stage + i}.1": f"up_blocks.{stage}.attentions.{i}"
        for stage in (0, 1)
        for i in range(3)
    },
}
UNET_RESNETS = {
    **{
        f"input_blocks.{3 * stage + 1 + i}.0": f"down_blocks.{stage}.resnets.{i}"
        for stage in range(3)
        for i in (0, 1)
    },
    **{f"middle_block.{2 * i}": f"mid_block.resnets.{i}" for i in (0, 1)},
    **{
        f"output_blocks.{3 * stage + i}.0": f"up_blocks.{stage}.resnets.{i}"
        for stage in range(3)
        for i in range(3)
    },
}
UNET_LAYERS = _same(
    "proj_in",
    "proj_out",
    *(
        f"transformer_blocks.#.{attention}.{part}"
        for attention in ("attn1", "attn2")
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "transformer_blocks.#.ff.net.0.proj",
    "transformer_blocks.#.ff.net.2",
)
SDXL: Mapping[str, Parts] = {
    **_within(UNET_TRANSFORMERS, UNET_LAYERS),
    **_within(UNET_RESNETS, {"emb_layers.1": ("time_emb_proj",)}),
    **_embedder("time_embed", "time_embedding", (0, 2)),
    **_embedder("label_emb.0", "add_embedding", (0, 2)),
}
"""Blocks of the published UNet, with two layers per stage; its convolutions are left out."""

SD3: Mapping[str, Parts] = {
    **_within(
        {"joint_blocks.#": "transformer_blocks.#"},
        {
            "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "x_block.attn.proj": ("attn.to_out.0",),
            "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            "x_block.attn2.proj": ("attn2.to_out.0",),
            "x_block.mlp.fc1": ("ff.net.0.proj",),
            "x_block.mlp.fc2": ("ff.net.2",),
            "x_block.adaLN_modulation.1": ("norm1.linear",),
            "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "context_block.attn.proj": ("attn.to_add_out",),
            "context_block.mlp.fc1": ("ff_context.net.0.proj",),
            "context_block.mlp.fc2": ("ff_context.net.2",),
            "context_block.adaLN_modulation.1": ("norm1_context.linear",),
        },
    ),
    **_embedder("t_embedder.mlp", "time_text_embed.timestep_embedder", (0, 2)),
    **_embedder("y_embedder.mlp", "time_text_embed.text_embedder", (0, 2)),
    **_one(context_embedder="context_embedder", final_layer__linear="proj_out"),
}
SD3_SWAPPED = frozenset({"joint_blocks.#.context_block.adaLN_modulation.1"})
"""In the last block, whose text ends there: it has no gates and no feed-forward part."""

FLUX1_CLASS, CHROMA_CLASS = "FluxTransformer2DModel", "ChromaTransformer2DModel"
SD3_CLASS = "SD3Transformer2DModel"
LAYOUTS: Mapping[str, Layout] = {
    "Flux2Transformer2DModel": Layout(FLUX2, FLUX2_RATIOS),
    FLUX1_CLASS: Layout(FLUX1, {}),
    CHROMA_CLASS: Layout(CHROMA, {}),
    "WanTransformer3DModel": Layout(WAN, {}),
    "Krea2Transformer2DModel": Layout(KREA2, {}),
    "QwenImage21Transformer2DModel": Layout(QWEN_21, {}, kohya_has_own_names=False),
    SD3_CLASS: Layout(SD3, {}, SD3_SWAPPED),
    "UNet2DConditionModel": Layout(SDXL, {}),
}
KEPT_NAMES = frozenset(
    {
        "QwenImageTransformer2DModel",
        "Kandinsky5Transformer3DModel",
        "ZImageTransformer2DModel",
        "LTX2VideoTransformer3DModel",
    }
)
"""Classes whose layers ComfyUI and kohya's scripts call as diffusers does, or understand so."""
NOT_READ_BY: Mapping[AdapterFormat, tuple[str, frozenset[str]]] = {
    "diffusers": (
        "ComfyUI",
        frozenset({"UNet2DConditionModel", "WanTransformer3DModel", "LTX2VideoTransformer3DModel"}),
    ),
    "comfyui": (
        "diffusers",
        frozenset(
            {
                "UNet2DConditionModel",
                SD3_CLASS,
                "Kandinsky5Transformer3DModel",
                "QwenImage21Transformer2DModel",
            }
        ),
    ),
    "kohya": ("ComfyUI", frozenset({"ZImageTransformer2DModel", "QwenImage21Transformer2DModel"})),
}
"""The other program to which people take files of a format, and whose layers it does not find in
them, or not all; told from its own loader in `tests/clients`."""
NUM_FLUX1_DOUBLE_BLOCKS, NUM_SD3_BLOCKS = 19, 38  # of Stable Diffusion 3.5 Large


def find_class(layers: Iterable[str]) -> str | None:
    """Find the class whose layers, by diffusers' names, these must be.

    Empty if of none in LAYOUTS, None if they may be of several: Stable Diffusion 3.5 has all names
    of FLUX.1's double blocks, Qwen-Image those of its attention. Chroma's layers pass for FLUX.1's,
    which other programs call the same.
    """
    names = tuple(layers)
    fitting = [
        name
        for name, layout in LAYOUTS.items()
        if name != CHROMA_CLASS and names and layout.has_layers(names)
    ]
    numbers = [int(number) for _, number in map(split_number, names) if number]
    if not fitting or not numbers:
        return ""
    is_flux = any(name.startswith("single_") for name in names)
    if len(fitting) == 1 and (fitting[0] != FLUX1_CLASS or is_flux):
        return fitting[0]
    if max(numbers) < NUM_FLUX1_DOUBLE_BLOCKS:
        return None
    if max(numbers) >= NUM_SD3_BLOCKS:
        return ""
    return SD3_CLASS if SD3_CLASS in fitting and any(".ff" in name for name in names) else None


def can_write(to: AdapterFormat, transformer: str) -> bool:
    """Return whether the names of the format are known for a model of this class."""
    return to == "diffusers" or transformer in LAYOUTS or transformer in KEPT_NAMES


def find_layout(widths: Mapping[str, tuple[int, int]], transformer: str | None) -> Layout | None:
    """Find the layout of the authors' names; by (inputs, outputs) where they are alike."""
    known = [LAYOUTS[name] for name in LAYOUTS if name == (transformer or name)]
    fitting = [layout for layout in known if widths and layout.has_originals(widths)]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return next((layout for layout in fitting if layout.has_widths(widths)), fitting[-1])


def restore_dots(kohya_names: Iterable[str]) -> list[str]:
    """List the dotted names of those, with underscores for dots, that are any layout's."""
    names = chain.from_iterable(
        layout.parts_of if layout.kohya_has_own_names else layout.original_of
        for layout in LAYOUTS.values()
    )
    dotted = {name.replace(".", "_"): name for name in names}
    keys = [split_number(name) for name in kohya_names]
    return [dotted[key].replace("#", number) for key, number in keys if key in dotted]


MLP_RATIO = 4  # rows of FLUX.1's `proj_mlp` for each input


@dataclass(frozen=True)
class LoraLayer:
    """The two matrices of one adapted module; its update is `up @ down * alpha / rank`."""

    down: Tensor  # (rank, inputs)
    up: Tensor  # (outputs, rank)
    alpha: float
    magnitude: Tensor | None = None  # (outputs,) norms of DoRA; None of a LoRA

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


def join_layers(layers: Mapping[str, LoraLayer], layout: Layout) -> dict[str, LoraLayer]:
    """Join layers to those of the authors. Raises InvalidInput for one without such a name."""
    joined: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        try:
            original = layout.original(name)
        except KeyError as error:
            message = f"{name} has no name in the code of the model's authors"
            raise InvalidInput(message, hint="choose the format diffusers") from error
        parts = layout.parts(original)
        if len(parts) == 1:
            joined[original] = _swap_halves(layer, original, layout)
        elif original not in joined:
            joined[original] = _join([layers.get(part) for part in parts], parts)
    return joined


def split_layers(layers: Mapping[str, LoraLayer], layout: Layout) -> dict[str, LoraLayer]:
    """Invert `join_layers`; each part gets its rows of `up` and all of `down`."""
    split: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        parts = layout.parts(name)
        if len(parts) == 1:
            split[parts[0]] = _swap_halves(layer, name, layout)
        else:
            split |= _split(layer, parts)
    return split


def _swap_halves(layer: LoraLayer, original: str, layout: Layout) -> LoraLayer:
    width = layer.down.shape[1]
    if split_number(original)[0] not in layout.swapped or len(layer.up) != 2 * width:
        return layer
    return replace(layer, up=layer.up.roll(width, 0))


def _join(layers: list[LoraLayer | None], parts: list[str]) -> LoraLayer:
    """Stack layers, None for one that was not adapted, filled with zeros to the largest rank."""
    adapted = [layer for layer in layers if layer is not None]
    first, rank = adapted[0], max(layer.rank for layer in adapted)
    scale, inputs = first.alpha / first.rank, first.down.shape[1]
    downs, ups = [], []
    for layer, part in zip(layers, parts, strict=True):
        rows = inputs * (MLP_RATIO if part.endswith("mlp") else 1)
        down = first.down.new_zeros(rank, inputs)
        up = first.up.new_zeros(len(first.up) if len(parts) == 2 else rows, rank)
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
