"""Names of the layers of every family's transformer, known without building it."""

import re
from functools import cache

from autotune.models.adapter import target_matcher
from autotune.models.family import Family
from autotune.system.files import read_table
from autotune.weights.names import LAYOUTS, expand

# Numbers of blocks in a layer's name.
LISTS = re.compile(r"(_blocks|^blocks|\bresnets|\battentions|^layers|_refiner)\.\d+\.")


@cache
def _layers(kind: str, transformer: str) -> frozenset[str]:
    data = read_table("models/layers.yaml")
    written = data[kind].get(transformer, "")
    for name, part in data["parts"].items():
        written = written.replace(name, part)
    return frozenset(expand(written))


def linear_layers(family: Family, *, in_blocks: bool = False) -> frozenset[str]:
    """Return names of a transformer's Linear layers, one block of each kind standing for all. A
    UNet's blocks are not apart from the rest."""
    is_apart = in_blocks and family.block_lists
    blocks = tuple(f"{name}." for name in family.block_lists) if is_apart else ("",)
    names = _layers("linear", family.transformer_class)
    return frozenset(name for name in names if name.startswith(blocks))


def convolutions(family: Family) -> frozenset[str]:
    """Return names of the convolutions of a family's model."""
    return _layers("convolutions", family.transformer_class)


def all_layers(family: Family) -> frozenset[str]:
    """Return names of the Linear layers and convolutions of a family's model."""
    return linear_layers(family) | convolutions(family)


def original_name(family: Family, layer: str) -> str:
    """Return a layer's name in the code of the model's authors, where several may be one."""
    layout = LAYOUTS.get(family.transformer_class)
    return layout.original(layer) if layout and layout.has_layers([layer]) else layer


def layers_of(family: Family, targets: str) -> frozenset[str]:
    """Return the layers that a target set, or patterns, adapt."""
    return frozenset(filter(target_matcher(family, targets), linear_layers(family)))


def find_target_set(family: Family, layers: frozenset[str]) -> tuple[str, str]:
    """Return the target set that differs least from these layers, kinds first, and how it
    differs."""
    sets = {name: layers_of(family, name) for name in family.target_sets}
    kinds = set(map(in_block, layers))
    by_kind = {name: len(kinds ^ set(map(in_block, own))) for name, own in sets.items()}
    name = min(sets, key=lambda one: (by_kind[one], len(sets[one] ^ layers), -len(sets[one])))
    texts = []
    own = {"also adapts": sets[name] - layers, "does not adapt": layers - sets[name]}
    for verb, names in own.items():
        inside = ((one, in_block(one)) for one in sorted(names))
        shown = (short + " outside the blocks" * (short == one) for one, short in inside)
        texts += [f"{verb} {', '.join(dict.fromkeys(shown))}"] if names else []
    return name, " and ".join(texts)


def in_block(name: str) -> str:
    """Return a layer's name in its block; its whole name if it is in none."""
    return name[max((found.end() for found in LISTS.finditer(name)), default=0) :]
