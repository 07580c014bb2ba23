"""Rules for adapted layers: a trainer's choice of names, and the nearest target set."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import regex

from autotune.interop import rules
from autotune.interop.rules import LOST, CannotExpress, Context, Rule, Values
from autotune.models import adapter
from autotune.models.adapter import in_block, layers_of, linear_layers
from autotune.models.family import Family
from autotune.weights.names import expand

MAX_BLOCKS = 64  # more than any list of a known model has

Choose = Callable[[Values, Context], set[str]]  # of a family's layers, those that keys adapt


def _has(name: str, parts: Iterable[str]) -> bool:
    return any(part in name for part in parts)


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def _fits(name: str, patterns: Iterable[Any], way: str = "fullmatch") -> bool:
    joined = "|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)"
    try:
        return bool(getattr(regex, way)(joined, name, timeout=0.1))  # some would take years
    except (regex.error, TimeoutError) as error:
        raise ValueError(str(error) or "the pattern takes too long") from error


def _targets(
    keys: Sequence[str],
    choose: Choose,
    ways: Callable[[frozenset[str], Context], Iterable[Values]],
    arguments: Sequence[str] = (),
) -> Rule:
    # `arguments`: those of `network_args` that the trainer understands.
    def read(values: Values, context: Context) -> Values:
        chosen = frozenset(choose(values, context))
        name, difference = adapter.find_target_set(context.family, chosen)
        lost = [f"the nearest set of layers {difference}"] if difference else []
        given = _network_arguments(values) if arguments else {}
        if others := ", ".join(one for one in given if one not in arguments):
            lost.append(f"{others}: {rules.NO_ARGUMENT}")
        return {"targets": name, LOST: "; ".join(lost)}

    def write(ours: Values, context: Context) -> Values:
        wanted = layers_of(context.family, ours["targets"])
        tried = list(ways(wanted, context))
        return next((way for way in tried if choose(way, context) == wanted), tried[-1])

    return Rule(tuple(keys), ("targets",), read, write)


def targets_by_parts(keys: str, blocks: Mapping[str, list[str]], authors_code: str) -> Rule:
    """Relate lists of parts of names, as ai-toolkit has them, by four keys: parts, those ignored,
    if only blocks are adapted, and convolutions' rank. `blocks`: by class, what names of layers in
    blocks hold; `authors_code`: classes that it trains by other names."""
    only, ignored, inside, convolution_rank = expand(keys)

    def name_of(family: Family, layer: str) -> str:
        is_authors = family.transformer_class in authors_code.split()
        return adapter.original_name(family, layer) if is_authors else layer

    def choose(values: Values, context: Context) -> set[str]:
        family, found = context.family, set()
        parts, ignores = values.get(only) or [""], values.get(ignored) or []
        usual = blocks.get(family.transformer_class, ["transformer_blocks"])
        inner = [""] if values.get(inside) is False else usual
        for layer in adapter.all_layers(family):
            is_linear = layer not in adapter.convolutions(family)
            name = name_of(family, layer)
            is_kind = is_linear or values.get(convolution_rank) or "shortcut" in layer
            is_placed = _has(name, inner) and not _has(name, ignores)
            if is_kind and is_placed and _has(name, parts):
                found.add(layer)
        return found

    def ways(wanted: frozenset[str], context: Context) -> Iterator[Values]:
        family = context.family
        by_name: Values = {only: sorted({in_block(name_of(family, one)) for one in wanted})}
        unwanted = choose(by_name, context) - wanted
        roots = sorted({name_of(family, layer).partition(".")[0] for layer in unwanted})
        yield from ({only: None}, by_name, {**by_name, ignored: roots}, {**by_name, inside: False})
        yield by_name

    return _targets([only, ignored, inside, convolution_rank], choose, ways)


def _of_family(by_beginning: Mapping[str, Any], family: Family) -> Any:
    return next(own for of, own in by_beginning.items() if family.name.startswith(of))


def targets_by_ends(
    key: str,
    usual: Mapping[str, str],
    joined: bool = False,
    named: str = "",
    sets: Mapping[str, str] = {},  # nobody changes it
    classes: str = "",
    places: Mapping[str, str] = {},
) -> Rule:
    """Relate ends of names as peft takes them: a list, or with `joined` one text with commas.
    `usual`: by how families' names begin, what is adapted if the key is not there, nor `named`,
    which names one of `sets`. `classes` lists classes of modules instead; `places` has, by the
    ends of their names, patterns of where their layers are."""

    def choose(values: Values, context: Context) -> set[str]:
        if of_classes := values.get(classes):
            at = [places[end] for one in of_classes for end in places if str(one).endswith(end)]
            return {layer for layer in linear_layers(context.family) if _fits(layer, at, "search")}
        given = values.get(key)
        if isinstance(given, str):
            is_json = given.startswith("[")
            given = json.loads(given) if is_json else [name.strip() for name in given.split(",")]
        own = sets[values[named]] if values.get(named) else _of_family(usual, context.family)
        ends = given or expand(own)
        return {layer for layer in adapter.all_layers(context.family) if _ends(layer, ends)}

    def ways(wanted: frozenset[str], context: Context) -> Iterator[Values]:
        every = linear_layers(context.family)
        found: dict[str, None] = {}
        for name in sorted(wanted):
            end = in_block(name)
            # By the same end in another place, or within: then it is named for each block.
            is_shared = any(_ends(other, [end]) for other in every - wanted)
            is_shared |= any(f".{end}." in other for other in every)
            numbers = range(MAX_BLOCKS) if is_shared else ()
            blocks = [name.replace(".0.", f".{number}.", 1) for number in numbers]
            found |= dict.fromkeys(blocks or [end])
        yield {key: ",".join(found) if joined else list(found)}

    return _targets([key, *filter(None, [named, classes])], choose, ways)


def targets_by_filter(key: str, is_pattern: str, preset: str) -> Rule:
    """Relate parts of names with commas between, or patterns if a key says so, as in OneTrainer."""

    def choose(values: Values, context: Context) -> set[str]:
        parts = [part.strip() for part in str(values.get(key) or "").split(",")]
        way = partial(_fits, way="search") if values.get(is_pattern) else _has
        return {layer for layer in adapter.all_layers(context.family) if way(layer, parts)}

    def ways(wanted: frozenset[str], context: Context) -> Iterator[Values]:
        # The first that fits takes a layer, and it refuses a filter that never did.
        parts = sorted(set(map(in_block, wanted)), key=lambda part: (-len(part), part))
        patterns = [f"^{in_any_block(layer)}$" for layer in sorted(wanted)]
        for written in (parts, patterns):
            yield {key: ",".join(written), is_pattern: written is patterns, preset: "custom"}

    def in_any_block(layer: str) -> str:
        if layer.startswith("mid_block.resnets."):  # its two are unlike each other
            return re.escape(layer)
        return re.escape(adapter.LISTS.sub(r"\1.NUMBER.", layer)).replace("NUMBER", r"\d+")

    return _targets([key, is_pattern], choose, ways)


def _network_arguments(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rules.named_arguments(values.get("network_args") or []).items():
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            found[name] = value
    return found


def targets_by_patterns(usual: Mapping[str, list[str]], everywhere: str) -> Rule:
    """Relate patterns in `network_args` (musubi's networks/lora.py, `create_modules`). `usual`: by
    how families' names begin, what is excluded and included; `everywhere`: also outside blocks."""

    def choose(values: Values, context: Context) -> set[str]:
        family, given = context.family, _network_arguments(values)
        exclude, include = _of_family(usual, family)
        excluded = [exclude, *given.get("exclude_patterns", ())]
        included = given.get("include_patterns", [include])
        every = linear_layers(family, in_blocks=family.name != everywhere)
        names = {layer: adapter.original_name(family, layer) for layer in every}
        is_in = {layer for layer, name in names.items() if _fits(name, included)}
        return is_in | {layer for layer, name in names.items() if not _fits(name, excluded)}

    def ways(wanted: frozenset[str], context: Context) -> Iterator[Values]:
        family = context.family
        names = {layer: adapter.original_name(family, layer) for layer in linear_layers(family)}
        others = {name for layer, name in names.items() if layer not in wanted}
        found = set()
        for name in (names[layer] for layer in wanted):
            end = r".*\." + re.escape(in_block(name))
            exact = re.escape(name).replace(r"\.0\.", r"\.\d+\.", 1)
            found.add(exact if any(re.fullmatch(end, other) for other in others) else end)
        included = "', r'".join(sorted(found))
        yield {"network_args": ["exclude_patterns=[r'.*']", f"include_patterns=[r'{included}']"]}

    return _targets(["network_args"], choose, ways, ("exclude_patterns", "include_patterns"))


def targets_by_ranks(parts: Mapping[str, str]) -> Rule:
    """Relate ranks of parts in `network_args` (sd-scripts, FLUX.1); of a UNet all transformers."""
    by_part = {name: written.split() for name, written in parts.items()}

    def choose(values: Values, context: Context) -> set[str]:
        given = _network_arguments(values)
        if context.is_discrete:
            others = (".resnets.", "samplers.") if given.get("conv_dim") else ()
            every = adapter.all_layers(context.family)
            return {layer for layer in every if _has(layer, (".attentions.", *others))}
        on = [name for name in by_part if given.get(name) != 0]
        return {
            layer
            for layer in adapter.all_layers(context.family)
            for part in on
            if layer != in_block(layer) in by_part[part]
            if layer.startswith("single_") == part.startswith("single_")
        }

    def ways(wanted: frozenset[str], context: Context) -> Iterator[Values]:
        usual: Values = {"network_args": None}
        if context.is_discrete and choose(usual, context) & linear_layers(context.family) != wanted:
            own_set = "all layers of the UNet's transformers; use --targets attention+mlp+proj"
            raise CannotExpress(f"it adapts {own_set}")
        if not context.is_discrete and wanted == layers_of(context.family, "attention"):
            what = "in its single blocks attention and MLP are one layer"
            raise CannotExpress(f"{what}; use --targets attention+mlp")
        if not context.is_discrete:
            yield {"network_args": ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"]}
        yield usual

    return _targets(["network_args"], choose, ways, (*by_part, "conv_dim", "conv_alpha"))
