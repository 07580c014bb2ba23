"""Single files: what model the DiT or UNet in one is, and where its VAE and text encoders are."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.models import facts, registry
from autotune.models.family import Family, build_on_meta
from autotune.plan.job import ModelRef
from autotune.weights.files import BadWeights, MissingWeights, WeightSource, open_weights
from autotune.weights.single_file import first_names, has_part, view_as

SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".sft")

Found = tuple[Family, facts.PublishedModel]


def open_single_file(path: Path) -> WeightSource:
    """Open a file that a user named. Raises BadWeights if it is absent or damaged."""
    if path.suffix == ".gguf":
        raise BadWeights(
            f"{path} is a GGUF file, whose quantized weights cannot be trained on",
            hint="take the same model as .safetensors in bf16, fp16 or fp8; autotune quantizes by "
            "itself: --quality compact",
        )
    return open_weights(path)


def recognize(source: WeightSource) -> tuple[Found, ...]:
    """Find the published models of a file's architecture, nearest first, or raise BadWeights."""
    found: list[Found] = []
    refusals: dict[str, BadWeights] = {}
    expected: dict[str, list[str]] = {}  # names of models by their size
    for family in registry.FAMILIES.values():
        # Names that begin otherwise than the class's are told much quicker than all shapes.
        config, beginnings = _config_and_beginnings(family)
        if not beginnings <= first_names(source, family.transformer_class, config):
            continue
        for model in family.models:
            if error := _why_not(source, family, model.config):
                transformer = build_on_meta(family, model.config)
                shapes = {name: tuple(each.shape) for name, each in transformer.named_parameters()}
                refusals[model.name] = error
                expected.setdefault(_describe_sizes(shapes), []).append(model.name)
            else:
                found.append((family, model))
    if not found:
        names = list(source.locations)
        what = f"its tensors are called {', '.join(names[:2]) or 'nothing'} ..."
        if refusals:
            shapes = {name: each.shape for name, (_, each) in source.locations.items()}
            sizes = "".join(f"\n  {', '.join(own)}: {size}" for size, own in expected.items())
            name, error = next(iter(refusals.items()))
            what = f"it has {_describe_sizes(shapes)}; models whose layers have such names:{sizes}"
            what += f".\nAs {name}, {error.message}"
        if any(".lora_" in name or "_lora." in name for name in names):
            what = "it is an adapter"
        raise BadWeights(
            f"{source.path} holds no known model: {what}",
            hint="a DiT or UNet of `autotune models` is understood; if it is one of other sizes, "
            "name its folder: --base",
        )
    return sort_by_name(source.path.stem, found)


def _describe_sizes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    billions = sum(map(math.prod, shapes.values())) / 1e9
    lists: dict[str, int] = {}
    for name in shapes:
        if numbered := re.match(r"(?:.*?\.)??(\w+)\.(\d+)\.", name):
            lists[numbered[1]] = max(lists.get(numbered[1], 0), int(numbered[2]) + 1)
    longest = sorted(lists.items(), key=lambda one: -one[1])[:2]
    blocks = " and ".join(f"{number} {name}" for name, number in longest if number > 3)
    return f"{billions:.2f} billion parameters" + f" in {blocks}" * bool(blocks)


def find_config(
    source: WeightSource, family: Family, configs: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the first configuration whose transformer is in the file, else raise BadWeights."""
    refusals = []
    for config in configs:
        error = _why_not(source, family, config)
        if error is None:
            return config
        refusals.append(error)
    raise refusals[0]


@cache
def _config_and_beginnings(family: Family) -> tuple[Mapping[str, Any], set[str]]:
    tiny = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    config = {**tiny.config, **family.transformer_config}
    return config, {name.partition(".")[0] for name in tiny.state_dict()}


def _why_not(source: WeightSource, family: Family, config: Mapping[str, Any]) -> BadWeights | None:
    from autotune.weights.stream import check_source

    transformer = build_on_meta(family, config)
    return _error_of(lambda: check_source(transformer, view_as(source, transformer)))


def _error_of(check: Callable[[], object]) -> BadWeights | None:
    try:
        check()
    except BadWeights as error:
        return error
    return None


def _words(name: str) -> set[str]:
    # Of any style: `Wan2_2-LOW`, `wan22_lownoise`, `zImage`.
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z][a-z])", " ", name).lower()
    spaced = re.sub(r"(?<=[a-z])(\d)_(\d)(?![a-z\d])", r"\1.\2", spaced)
    spaced = re.sub(r"(?<=[a-z]{2})(\d)(\d)(?!\d)", r"\1.\2", spaced)
    spaced = re.sub(r"(?<=low|igh)_?(?=noise)", " ", spaced)
    return set(re.findall(r"[a-z]{2,}|\d+(?:\.\d+)*", spaced))


def sort_by_name(name: str, found: Sequence[Found]) -> tuple[Found, ...]:
    """Sort models of one architecture by how well a file's name fits their own."""
    in_name, own = _words(name), [_words(model.hub_id.partition("/")[2]) for _, model in found]
    common = own[0].intersection(*own)
    if not in_name & own[0].union(*own):
        return tuple(found)
    fits = [(-len(words & in_name - common), len(words - in_name - common)) for words in own]
    return tuple(found[number] for number in sorted(range(len(found)), key=fits.__getitem__))


def named_expert(name: str, family: Family) -> str | None:
    """Find the expert that a file's name tells of; InvalidInput if it tells none of several, or a
    transformer that is not trained."""
    if family.untrained_files and re.search(family.untrained_files, name, re.IGNORECASE):
        what = f"{name} is {family.name}'s other transformer, whose layers have the same names"
        hint = f"take the file of its {family.denoiser}/, which is the one that is trained"
        raise InvalidInput(what, hint=hint)
    named = [expert for expert in family.experts if expert.partition("-")[0] in _words(name)]
    if family.experts and len(named) != 1:
        what = f"the name of {name} does not say which of {family.name}'s transformers it is"
        hint = f"say it: {' or '.join(f'--expert {expert}' for expert in family.experts)}"
        raise InvalidInput(what, hint=hint)
    return named[0] if named else None


def named_parts(file: Path, ref: ModelRef) -> tuple[Path | None, list[Path]]:
    """Find what the user named besides a single `file`, else raise MissingWeights."""
    named = [("vae", ref.vae)] if ref.vae else []
    named += [("text_encoder", path) for path in ref.text_encoders]
    paths = [Path(os.path.expanduser(path)) for _, path in named]  # noqa: PTH111
    for (name, _), path in zip(named, paths, strict=True):
        if not path.exists():
            raise MissingWeights(f"{path} does not exist", hint=where_usually(file, name))
    return (paths[0], paths[1:]) if ref.vae else (None, paths)


def find_parts(
    source: WeightSource,
    family: Family,
    vae: Path | None,
    encoders: Sequence[Path],
    folder: Path | None,
) -> dict[str, Path]:
    """Find the weights of VAE and text encoders that are not in the base, by component; the
    configurations in its `folder` tell which encoder a file is. Raises InvalidInput or BadWeights
    if one is no text encoder of the family."""
    names = family.text_encoders
    found = {name: source.path for name in ("vae", *names) if has_part(source, name)}
    if len(encoders) > len(names):
        what = f"{family.name} has {len(names)} text encoder(s), not {len(encoders)}"
        raise InvalidInput(what, hint=f"give --text-encoder at most {len(names)} time(s)")
    if vae:
        found["vae"] = vae
    if folder and len(names) > 1:
        return found | _assign(encoders, names, folder)
    return found | dict(zip(names, encoders, strict=False))


def _assign(files: Sequence[Path], names: Sequence[str], folder: Path) -> dict[str, Path]:
    from autotune.weights.stream import check_part

    found: dict[str, Path] = {}
    for path in files:
        errors = {name: _error_of(partial(check_part, folder, name, path)) for name in names}
        refusals = [error for error in errors.values() if error]
        if len(refusals) == len(names):
            raise refusals[0]
        free = [name for name in names if not (errors[name] or name in found)]
        if not free:
            raise InvalidInput(f"{path} is the same text encoder as another", hint="name each once")
        found[free[0]] = path
    return found


def where_usually(file: Path, name: str) -> str:
    """Name a component's option, and where such a file usually lies next to `file` in ComfyUI."""
    option, place = ("--vae", "vae") if name == "vae" else ("--text-encoder", "text_encoders")
    above = (parent for parent in file.absolute().parents if parent.name == "models")
    models = next(above, Path("models"))
    return f"name its file: {option} FILE; in a ComfyUI folder it usually lies in {models / place}"
