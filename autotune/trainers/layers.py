"""Which layers a set of names adapts, in each trainer's way of naming them, so that target sets can be compared."""

import re
from collections.abc import Callable, Mapping, Sequence

from autotune.families import Family

QWEN_IMAGE = (
    *(f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"transformer_blocks.0.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"transformer_blocks.0.{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    *(f"transformer_blocks.0.{stream}_mod.1" for stream in ("img", "txt")),
    *("img_in", "txt_in", "norm_out.linear", "proj_out"),
    *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
)
FLUX = (
    *(f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"transformer_blocks.0.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"transformer_blocks.0.ff{part}.net.{layer}" for part in ("", "_context") for layer in ("0.proj", "2")),
    *(f"transformer_blocks.0.norm1{part}.linear" for part in ("", "_context")),
    *(f"single_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")),
    *(f"single_transformer_blocks.0.{name}" for name in ("proj_mlp", "proj_out", "norm.linear")),
    *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    *(
        f"time_text_embed.{part}_embedder.linear_{number}"
        for part in ("timestep", "guidance", "text")
        for number in (1, 2)
    ),
)
KANDINSKY5 = (
    *(
        f"{place}_attention.{name}"
        for place in (
            "text_transformer_blocks.0.self",
            "visual_transformer_blocks.0.self",
            "visual_transformer_blocks.0.cross",
        )
        for name in ("to_query", "to_key", "to_value", "out_layer")
    ),
    *(
        f"{kind}_transformer_blocks.0.feed_forward.{name}_layer"
        for kind in ("text", "visual")
        for name in ("in", "out")
    ),
    *(f"{kind}_transformer_blocks.0.{kind}_modulation.out_layer" for kind in ("text", "visual")),
    *("time_embeddings.in_layer", "time_embeddings.out_layer", "text_embeddings.in_layer"),
    *("pooled_text_embeddings.in_layer", "visual_embeddings.in_layer"),
    *("out_layer.modulation.out_layer", "out_layer.out_layer"),
)
LINEAR_LAYERS: Mapping[str, tuple[str, ...]] = {
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "FluxTransformer2DModel": FLUX,
    "Kandinsky5Transformer3DModel": KANDINSKY5,
}
"""By class of transformer: every Linear layer outside the blocks, and those of the first block of each kind."""

Selects = Callable[[str], bool]
"""Whether a trainer adapts the layer of this name."""


def linear_layers(family: Family, *, in_blocks: bool = False) -> frozenset[str]:
    """Names of the Linear layers of a family's transformer, one block of each kind standing for all."""
    names = LINEAR_LAYERS.get(family.transformer_class, ())
    return frozenset(name for name in names if not in_blocks or name.startswith(tuple(family.block_lists)))


def layers_of(family: Family, targets: str) -> frozenset[str]:
    """The layers that a target set adapts, by peft's rule: a pattern of whole names, or a list of their ends."""
    wanted = family.target_set(targets)
    selects = by_pattern(wanted) if isinstance(wanted, str) else by_ends(wanted)
    return frozenset(filter(selects, linear_layers(family)))


def find_target_set(family: Family, layers: frozenset[str]) -> tuple[str, str]:
    """The target set that differs least from these layers, and how it differs."""
    sets = {name: layers_of(family, name) for name in family.target_sets}
    name = min(sets, key=lambda one: (len(sets[one] ^ layers), -len(sets[one])))
    extra, lacking = sorted(sets[name] - layers), sorted(layers - sets[name])
    texts = [f"also adapts {_short(extra)}"] * bool(extra) + [f"does not adapt {_short(lacking)}"] * bool(lacking)
    return name, " and ".join(texts)


def short_names(family: Family, targets: str) -> list[str]:
    """What the layers of a target set are called within a block: `attn.to_q`."""
    return sorted({in_block(name) for name in layers_of(family, targets)})


def in_block(name: str) -> str:
    """A layer's name within its block."""
    return re.sub(r"^\w+_blocks\.\d+\.", "", name)


def _short(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(in_block(one) + " outside the blocks" * ("_blocks." not in one) for one in names))


def by_pattern(pattern: str) -> Selects:
    """Layers whose whole name the pattern matches."""
    return lambda name: re.fullmatch(pattern, name) is not None


def by_ends(ends: Sequence[str]) -> Selects:
    """Layers whose name is one of these, or ends with one after a dot."""
    return lambda name: any(name == end or name.endswith(f".{end}") for end in ends)


def by_parts(only: Sequence[str], ignored: Sequence[str] = ()) -> Selects:
    """Layers whose name has one of the texts in it, and none of the ignored."""
    return lambda name: any(part in name for part in only) and not any(part in name for part in ignored)
