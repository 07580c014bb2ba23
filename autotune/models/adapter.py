"""Adapters (LoRA, rsLoRA, DoRA, LoKr): the layers that they may be for, and putting them on."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any
from unittest import mock

from autotune.errors import InvalidInput
from autotune.models.family import Family
from autotune.plan.workload import Workload
from autotune.system.files import read_table
from autotune.system.lazy import nn, torch
from autotune.weights.names import LAYOUTS, expand, lokr_shapes

ADAPTER_NAME = "default"


def block_numbers(text: str, num_blocks: int) -> frozenset[int] | None:
    """Parse the blocks that `0-4,18` names, None for `all`; InvalidInput if there are fewer."""
    if text == "all":
        return None
    ranges = [[int(number) for number in part.split("-")] for part in text.split(",")]
    numbers = {number for ends in ranges for number in range(ends[0], ends[-1] + 1)}
    if not numbers or max(numbers) >= num_blocks:
        what = f"{text} are not blocks of this model"
        raise InvalidInput(what, hint=f"its blocks are 0 to {num_blocks - 1}: --blocks 0-4,18")
    return frozenset(numbers)


def choose_layers(
    family: Family, transformer: nn.Module, targets: str, blocks: str = "all"
) -> Sequence[str] | str:
    """Choose the adapted layers, in the form that peft's `target_modules` takes. `targets` is the
    name of a set of the family's, or shell patterns of names of Linear layers or of their ends,
    separated by commas: `*.attn.to_q,to_v`. Raises InvalidInput for none."""
    own = family.blocks(transformer)
    numbers = block_numbers(blocks, len(own))
    if targets in family.target_sets and numbers is None:
        return family.target_set(targets)
    is_target = target_matcher(family, targets)
    kinds = (nn.Linear, nn.Conv2d) if targets in family.target_sets else (nn.Linear,)
    layers = {name: each for name, each in transformer.named_modules() if isinstance(each, kinds)}
    chosen = [name for name in layers if is_target(name)]
    if numbers is not None:
        kept = {module for number in numbers for module in own[number].modules()}
        chosen = [name for name in chosen if layers[name] in kept]
    if not chosen:
        if targets not in family.target_sets and not set(targets) & set("*?.,[_"):
            family.target_set(targets)  # a name, not a pattern: the nearest is told
        linear = (name for name, layer in layers.items() if isinstance(layer, nn.Linear))
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear})[:8])
        where = f" in the blocks {blocks}" if numbers else ""
        raise InvalidInput(
            f"no layer of {family.name} is called {targets!r}{where}",
            hint=f"--targets takes {', '.join(family.target_sets)}, or patterns of names that end "
            f"in {ends}",
        )
    return "|".join(re.escape(name) for name in chosen)


def target_matcher(family: Family, targets: str) -> Callable[[str], bool]:
    """Return a test of layers' names: by peft's rule for the family's sets, or by pattern."""
    known = family.target_sets.get(targets)
    if known is not None:
        return _peft_rule(known)
    patterns = [part.strip() for part in targets.split(",") if part.strip()]
    return lambda name: any(
        fnmatchcase(name, one) or fnmatchcase(name, f"*.{one}") for one in patterns
    )


def _peft_rule(chosen: Sequence[str] | str) -> Callable[[str], bool]:
    # As `target_modules` in peft: an expression for whole names, or ends of names.
    if isinstance(chosen, str):
        return lambda name: re.fullmatch(chosen, name) is not None
    return lambda name: any(name == end or name.endswith(f".{end}") for end in chosen)


def adapter_shapes(
    family: Family, transformer: nn.Module, workload: Workload
) -> Counter[tuple[int, ...]]:
    """Count the parameters of each shape that `add_adapter` would add, at once."""
    chosen = choose_layers(family, transformer, workload.targets, workload.adapted_blocks)
    is_chosen = _peft_rule(chosen)
    shapes: Counter[tuple[int, ...]] = Counter()
    for name, module in transformer.named_modules():
        if is_chosen(name):
            num_outputs, num_inputs, *kernel = module.weight.shape
            if workload.adapter == "lokr":
                shape = (num_outputs, num_inputs, *kernel)
                shapes.update(lokr_shapes(shape, workload.rank, workload.lokr_factor).values())
                continue
            shapes[workload.rank, num_inputs, *kernel] += 1
            shapes[num_outputs, workload.rank, *(1 for _ in kernel)] += 1
            if workload.adapter == "dora":  # the lengths of the outputs' weights
                shapes[(1, num_outputs, *(1 for _ in kernel)) if kernel else (num_outputs,)] += 1
    return shapes


def add_adapter(
    family: Family,
    transformer: nn.Module,
    workload: Workload,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    lean: bool = True,
) -> list[nn.Parameter]:
    """Freeze `transformer`, add the workload's adapter to it, and return its parameters in order.

    The adapter lives in the compute `dtype`: with another one, peft would copy every layer's input
    into it and keep the copy for the backward pass. Dropout works even in evaluation mode, as all
    are trained. Without `lean`, layers compute as peft's do. Raises InvalidInput for no layers.
    """
    from peft import LoKrConfig, LoraConfig

    chosen = choose_layers(family, transformer, workload.targets, workload.adapted_blocks)
    modules = chosen if isinstance(chosen, str) else list(chosen)
    config: LoKrConfig | LoraConfig
    if workload.adapter == "lokr":
        config = LoKrConfig(
            r=workload.rank,
            alpha=workload.lora_alpha,
            decompose_factor=workload.lokr_factor or -1,
            init_weights="lycoris",  # as the trainers that have LoKr
            target_modules=modules,
        )
    else:
        config = LoraConfig(
            r=workload.rank,
            lora_alpha=workload.lora_alpha,
            lora_dropout=workload.lora_dropout,
            init_lora_weights=True,
            use_rslora=workload.adapter == "rslora",
            use_dora=workload.adapter == "dora",
            target_modules=modules,
        )
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _no_import_of_bitsandbytes():
            transformer.add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    if workload.adapter == "lokr":
        transformer.eval()  # in training mode each of peft's layers draws a number for a dropout
    if lean:
        from autotune.models.low_rank import make_lean  # which needs torch to be defined

        make_lean(transformer)
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    return parameters


@contextlib.contextmanager
def _no_import_of_bitsandbytes() -> Iterator[None]:
    # peft takes a second or two to import it and look for its layers: there are none without it.
    if "bitsandbytes" in sys.modules:
        yield
        return
    from peft.tuners.lora import model

    with contextlib.ExitStack() as stack:
        for name in ("is_bnb_available", "is_bnb_4bit_available"):
            stack.enter_context(mock.patch.object(model, name, return_value=False, create=True))
        yield


def find_dropout_layers(transformer: nn.Module) -> list[nn.Module]:
    """Find the layers that draw random numbers in a training step."""
    return [
        module
        for module in transformer.modules()
        if isinstance(module, nn.Dropout) and module.training and module.p
    ]


@contextlib.contextmanager
def disable_dropout(transformer: nn.Module) -> Iterator[None]:
    """Compute with the adapter as it will be used, without dropout."""
    layers = find_dropout_layers(transformer)
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


@contextlib.contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """Compute as the base does. Unlike `disable_adapters` it leaves alone what is trained."""
    layers = [layer for layer in _adapted_modules(transformer) if not layer._disable_adapters]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextlib.contextmanager
def negated_adapter(transformer: nn.Module) -> Iterator[None]:
    """Compute with the adapter at strength -1, in the backward pass, too."""
    layers = _adapted_modules(transformer)
    for layer in layers:
        layer.scaling[ADAPTER_NAME] *= -1
    try:
        yield
    finally:
        for layer in layers:
            layer.scaling[ADAPTER_NAME] *= -1


def _adapted_modules(transformer: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


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
    """Return the target set with these layers, or patterns for them; if there are none, the set
    that differs least, and how it differs."""
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
    patterns = {LISTS.sub(r"\1.*.", layer) for layer in layers}
    ends = {end for end in kinds if layers_of(family, end) <= layers}
    patterns = {one for one in patterns if in_block(one.replace("*", "0")) not in ends} | ends
    if texts and patterns and layers_of(family, written := ",".join(sorted(patterns))) == layers:
        return written, ""
    return name, " and ".join(texts)


def in_block(name: str) -> str:
    """Return a layer's name in its block; its whole name if it is in none."""
    return name[max((found.end() for found in LISTS.finditer(name)), default=0) :]
