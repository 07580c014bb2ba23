"""Which layers a set of names adapts, in each trainer's way of naming them, so that target sets
can be compared.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from autotune.families import Family, target_matcher
from autotune.weights import LAYOUTS

ATTENTION = "{to_q,to_k,to_v,to_out.0}"
JOINT = "attn.{to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out}"
EMBEDDER = "embedder.linear_{1,2}"
KREA_BLOCK = "{attn.{to_q,to_k,to_v,to_gate,to_out.0},ff.{gate,up,down}}"
Z_BLOCK = f"{{attention.{ATTENTION},feed_forward.w{{1,2,3}}}}"
SDXL_LAYERS = (
    f"{{proj_in,proj_out,transformer_blocks.0.{{attn{{1,2}}.{ATTENTION},ff.net.{{0.proj,2}}}}}}"
)
KANDINSKY_ATTENTION = "{text_transformer_blocks.0.self,visual_transformer_blocks.0.{self,cross}}"
LINEAR_LAYERS: Mapping[str, tuple[str, ...]] = {
    "QwenImageTransformer2DModel": (
        f"transformer_blocks.0.{{{JOINT},{{img,txt}}_{{mlp.net.{{0.proj,2}},mod.1}}}}",
        f"{{img_in,txt_in,norm_out.linear,proj_out,time_text_embed.timestep_{EMBEDDER}}}",
    ),
    "FluxTransformer2DModel": (
        f"transformer_blocks.0.{{{JOINT},{{ff,ff_context}}.net.{{0.proj,2}},{{norm1,norm1_context}}.linear}}",
        "single_transformer_blocks.0.{attn.{to_q,to_k,to_v},proj_mlp,proj_out,norm.linear}",
        "{x_embedder,context_embedder,norm_out.linear,proj_out}",
        f"time_text_embed.{{timestep,guidance,text}}_{EMBEDDER}",
    ),
    "ChromaTransformer2DModel": (
        f"transformer_blocks.0.{{{JOINT},{{ff,ff_context}}.net.{{0.proj,2}}}}",
        "single_transformer_blocks.0.{attn.{to_q,to_k,to_v},proj_mlp,proj_out}",
        "{x_embedder,context_embedder,proj_out,distilled_guidance_layer.{{in,out}_proj,layers.{0,1,2,3,4}.linear_{1,2}}}",
    ),
    "SD3Transformer2DModel": (
        f"transformer_blocks.0.{{{JOINT},attn2.{ATTENTION},{{ff,ff_context}}.net.{{0.proj,2}},norm1{{,_context}}.linear}}",
        f"{{context_embedder,norm_out.linear,proj_out,time_text_embed.{{timestep,text}}_{EMBEDDER}}}",
    ),
    "Kandinsky5Transformer3DModel": (
        f"{KANDINSKY_ATTENTION}_attention.{{to_query,to_key,to_value,out_layer}}",
        "{text,visual}_transformer_blocks.0.feed_forward.{in,out}_layer",
        "{text_transformer_blocks.0.text,visual_transformer_blocks.0.visual}_modulation.out_layer",
        "{time_embeddings.{in,out}_layer,{text,pooled_text,visual}_embeddings.in_layer}",
        "out_layer.{modulation.out_layer,out_layer}",
    ),
    "ZImageTransformer2DModel": (
        f"{{noise_refiner,context_refiner,layers}}.0.{Z_BLOCK}",
        "{noise_refiner,layers}.0.adaLN_modulation.0",
        "all_final_layer.2-1.{adaLN_modulation.1,linear}",
        "{all_x_embedder.2-1,cap_embedder.1,t_embedder.mlp.{0,2}}",
    ),
    "UNet2DConditionModel": (
        f"{{{{down,up}}_blocks.0,mid_block}}.attentions.0.{SDXL_LAYERS}",
        "{{down,up}_blocks.0.resnets.0,mid_block.resnets.{0,1}}.time_emb_proj",
        "{time,add}_embedding.linear_{1,2}",
    ),
    "Flux2Transformer2DModel": (
        f"transformer_blocks.0.{{{JOINT},{{ff,ff_context}}.linear_{{in,out}}}}",
        "single_transformer_blocks.0.attn.{to_qkv_mlp_proj,to_out}",
        "{double_stream_modulation_{img,txt},single_stream_modulation,norm_out}.linear",
        f"{{x_embedder,context_embedder,proj_out,time_guidance_embed.timestep_{EMBEDDER}}}",
    ),
    "WanTransformer3DModel": (
        f"blocks.0.{{attn{{1,2}}.{ATTENTION},ffn.net.{{0.proj,2}}}}",
        f"{{proj_out,condition_embedder.{{time_proj,{{text,time}}_{EMBEDDER}}}}}",
    ),
    "Krea2Transformer2DModel": (
        f"{{transformer_blocks,text_fusion.{{layerwise,refiner}}_blocks}}.0.{KREA_BLOCK}",
        "{img_in,final_layer.linear,text_fusion.projector,{time_embed,txt_in}.linear_{1,2},time_mod_proj}",
    ),
}
"""By class of transformer, with choices in braces: every Linear layer outside the blocks, and
those of the first block of each kind."""

CONVOLUTIONS: Mapping[str, tuple[str, ...]] = {
    "UNet2DConditionModel": (
        "{conv_in,conv_out,down_blocks.0.downsamplers.0.conv,up_blocks.0.upsamplers.0.conv}",
        "{{{down,up}_blocks.0.resnets.0,mid_block.resnets.{0,1}}.conv{1,2},{down,up}_blocks.0.resnets.0.conv_shortcut}",
    ),
    "SD3Transformer2DModel": ("pos_embed.proj",),
}
"""Layers that some trainers adapt too, and autotune does not."""
LISTS = re.compile(r"(_blocks|^blocks|\bresnets|\battentions|^layers|_refiner)\.\d+\.")
"""Numbers of blocks in a layer's name."""
MAX_BLOCKS = 64
"""More than any list of a known model has."""
Selects = Callable[[str], bool]
"""Whether a trainer adapts the layer of this name."""


@cache
def linear_layers(family: Family, *, in_blocks: bool = False) -> frozenset[str]:
    """Names of the Linear layers of a family's transformer, one block of each kind standing for
    all. A UNet's blocks are not apart from the rest."""
    names = [
        name for text in LINEAR_LAYERS.get(family.transformer_class, ()) for name in _expand(text)
    ]
    blocks = (
        tuple(f"{name}." for name in family.block_lists)
        if in_blocks and family.block_lists
        else ("",)
    )
    return frozenset(name for name in names if name.startswith(blocks))


def convolutions(family: Family) -> frozenset[str]:
    """Names of the convolutions of a family's model."""
    return frozenset(
        name for text in CONVOLUTIONS.get(family.transformer_class, ()) for name in _expand(text)
    )


def _expand(text: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`, with braces in braces."""
    inner = re.search(r"\{([^{}]*)\}", text)
    if inner is None:
        return [text]
    parts = (text[: inner.start()] + one + text[inner.end() :] for one in inner[1].split(","))
    return list(dict.fromkeys(name for part in parts for name in _expand(part)))


def original_name(family: Family, layer: str) -> str:
    """A layer's name in the code of the model's authors, if the model has another one there:
    several layers may be one there."""
    layout = LAYOUTS.get(family.transformer_class)
    return layout.original(layer) if layout and layout.has_layers([layer]) else layer


def layers_of(family: Family, targets: str) -> frozenset[str]:
    """The layers that a target set, or patterns, adapt."""
    return frozenset(filter(target_matcher(family, targets), linear_layers(family)))


def find_target_set(family: Family, layers: frozenset[str]) -> tuple[str, str]:
    """The target set that differs least from these layers, by kinds of layers first, and how it
    differs.
    """
    sets = {name: layers_of(family, name) for name in family.target_sets}
    kinds = set(map(in_block, layers))
    by_kind = {name: len(kinds ^ set(map(in_block, own))) for name, own in sets.items()}
    name = min(sets, key=lambda one: (by_kind[one], len(sets[one] ^ layers), -len(sets[one])))
    extra, lacking = sorted(sets[name] - layers), sorted(layers - sets[name])
    texts = [f"also adapts {_short(extra)}"] * bool(extra) + [
        f"does not adapt {_short(lacking)}"
    ] * bool(lacking)
    return name, " and ".join(texts)


def short_names(family: Family, targets: str) -> list[str]:
    """What the layers of a target set are called within a block: `attn.to_q`."""
    return sorted({in_block(name) for name in layers_of(family, targets)})


def peft_names(family: Family, targets: str) -> list[str]:
    """Ends of names that adapt the target set alone: a layer whose short name another also has,
    or a module around layers, is named for each block."""
    wanted, every = layers_of(family, targets), linear_layers(family)
    found: list[str] = []
    for name in sorted(wanted):
        end = in_block(name)
        is_shared = any(by_ends([end])(other) for other in every - wanted)
        if is_shared or any(f".{end}." in other for other in every):
            found += [name.replace(".0.", f".{number}.", 1) for number in range(MAX_BLOCKS)]
        else:
            found.append(end)
    return list(dict.fromkeys(found))


def in_any_block(layer: str) -> str:
    """A pattern for the name of a layer in any block."""
    if layer.startswith("mid_block.resnets."):
        return re.escape(layer)
    return re.escape(LISTS.sub(r"\1.NUMBER.", layer)).replace("NUMBER", r"\d+")


def in_block(name: str) -> str:
    """A layer's name within its block."""
    return name[max((found.end() for found in LISTS.finditer(name)), default=0) :]


def _short(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(_told(one) for one in names))


def _told(name: str) -> str:
    short = in_block(name)
    return f"{short} outside the blocks" if short == name else short


def by_ends(ends: Sequence[str]) -> Selects:
    """Layers whose name is one of these, or ends with one after a dot."""
    return lambda name: any(name == end or name.endswith(f".{end}") for end in ends)


def by_parts(only: Sequence[str], ignored: Sequence[str] = ()) -> Selects:
    """Layers whose name has one of the texts in it, and none of the ignored."""
    return lambda name: (
        any(part in name for part in only) and not any(part in name for part in ignored)
    )
