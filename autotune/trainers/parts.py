"""Adapted layers by parts or ends of their names, as trainers choose them that go by names."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.families import Family
from autotune.trainers.layers import (
    Selects,
    by_ends,
    by_parts,
    convolutions,
    in_block,
    layers_of,
    linear_layers,
    original_name,
    peft_names,
)
from autotune.trainers.rules import Context, Rule, Values, targets


@dataclass(frozen=True)
class PartKeys:
    """A trainer's keys for lists of parts of names, and what it takes for a block."""

    only: str
    """Parts of which a name must hold one."""
    ignored: str
    """Parts of which it must hold none."""
    in_blocks: str
    """Whether layers outside the blocks are left out; true if it is absent."""
    blocks: str
    """Words `class=part|part`: what the names of layers hold that are in blocks;
    `transformer_blocks` by default.
    """
    authors_code: str
    """Classes that it trains in the code of their authors, by whose names it goes, with blanks
    between.
    """
    convolutions: str
    """Key for the rank of convolutions of more than a pixel; smaller ones are adapted as linear
    layers are.
    """

    def rule(self) -> Rule:
        """The rule for target sets."""
        keys = [self.only, self.ignored, self.in_blocks, self.convolutions]
        return targets(keys, self._selects, self._write, in_blocks=False)

    def _name(self, family: Family, layer: str) -> str:
        return (
            original_name(family, layer)
            if family.transformer_class in self.authors_code.split()
            else layer
        )

    def _selects(self, values: Values, context: Context) -> Selects:
        family = context.family
        is_chosen = by_parts(values.get(self.only) or ("",), values.get(self.ignored) or ())
        blocks = {
            of: parts.split("|")
            for of, _, parts in (word.partition("=") for word in self.blocks.split())
        }
        is_in_block = by_parts(blocks.get(family.transformer_class, ["transformer_blocks"]))
        everywhere, others = values.get(self.in_blocks) is False, convolutions(family)

        def selects(layer: str) -> bool:
            name = self._name(family, layer)
            is_adapted = (
                layer not in others or values.get(self.convolutions) or layer.endswith("shortcut")
            )
            return bool(is_adapted) and is_chosen(name) and (everywhere or is_in_block(name))

        return selects

    def _write(self, ours: Values, context: Context) -> Values:
        """The first of four ways that adapts what is wanted, the shortest first."""
        family, wanted = context.family, layers_of(context.family, ours["targets"])
        every = linear_layers(family) | convolutions(family)
        parts = sorted({in_block(self._name(family, layer)) for layer in wanted})
        by_name: Values = {self.only: parts}
        unwanted = filter(self._selects(by_name, context), every - wanted)
        roots = sorted({self._name(family, layer).partition(".")[0] for layer in unwanted})
        ways = (
            {self.only: None},
            by_name,
            {**by_name, self.ignored: roots},
            {**by_name, self.in_blocks: False},
        )
        return next(
            (way for way in ways if set(filter(self._selects(way, context), every)) == wanted),
            by_name,
        )


def by_filter(text: str, *, is_pattern: bool) -> Selects:
    """Layers whose name holds one of the parts with commas between, or what one of the patterns
    finds.
    """
    parts = [part.strip() for part in text.split(",")]
    if not is_pattern:
        return by_parts(parts)
    patterns = [re.compile(part) for part in parts]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def peft_targets(key: str, usual: Mapping[str, str], *, joined: bool = False) -> Rule:
    """Ends of names as peft takes them: a list, or with `joined` one text with commas.

    Args:
        key: theirs.
        usual: by how families' names begin, what is adapted if the key is not there, with blanks
            between.
        joined: how it is written; both are read.
    """

    def selects(values: Values, context: Context) -> Selects:
        given = values.get(key)
        if isinstance(given, str):
            given = (
                json.loads(given)
                if given.startswith("[")
                else [name.strip() for name in given.split(",")]
            )
        own = next(names for of, names in usual.items() if context.family.name.startswith(of))
        return by_ends(given or own.split())

    def write(ours: Values, context: Context) -> Values:
        names = peft_names(context.family, ours["targets"])
        return {key: ",".join(names) if joined else names}

    return targets([key], selects, write, in_blocks=False)
