"""What a single file holds: of which family its DiT or UNet is, and of which configuration; and where
its VAE and text encoders are: in files of their own, in it, or in its base."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.models.family import Family, PublishedModel, build_on_meta
from autotune.models.registry import FAMILIES
from autotune.plan.job import ModelRef
from autotune.weights import single_file
from autotune.weights.files import BadWeights, MissingWeights, WeightSource, open_weights
from autotune.weights.single_file import has_part, view_as

SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".sft")
"""Endings of files that people have models in."""


def open_single_file(path: Path) -> WeightSource:
    """The tensors of a file that a user named.

    Raises BadWeights if it is absent, damaged or of another format.
    """
    if path.suffix == ".gguf":
        raise BadWeights(
            f"{path} is a GGUF file, whose quantized weights cannot be trained on",
            hint="take the same model as .safetensors in bf16, fp16 or fp8; autotune quantizes by "
            "itself: "
            "--quality compact",
        )
    return open_weights(path)


def recognize(source: WeightSource) -> tuple[tuple[Family, PublishedModel], ...]:
    """The published models whose architecture the file has; of one architecture, those that its
    name fits come first.

    Raises BadWeights if there is none; the message says what comes nearest.
    """
    from autotune.weights.stream import check_source

    found, refusals = [], {}
    for family in FAMILIES.values():
        if not _may_be(source, family):
            continue
        for model in family.models:
            try:
                check_source(*_view(source, family, model.config))
            except BadWeights as error:
                refusals[model.name or family.name] = error
            else:
                found.append((family, model))
    if not found:
        raise BadWeights(
            f"{source.path} holds no known model: {_describe(source, refusals)}", hint=NOT_KNOWN
        )
    return _by_name(source.path.stem, found)


def _words(name: str) -> set[str]:
    """Words of two letters and more, and numbers, of a name in any style: `Wan2_2-LOW`,
    `wan22_lownoise`, `zImage`."""
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z][a-z])", " ", name).lower()
    spaced = re.sub(r"(?<=[a-z])(\d)_(\d)(?![a-z\d])", r"\1.\2", spaced)
    spaced = re.sub(r"(?<=[a-z]{2})(\d)(\d)(?!\d)", r"\1.\2", spaced)
    spaced = re.sub(r"(?<=low|igh)_?(?=noise)", " ", spaced)
    return set(re.findall(r"[a-z]{2,}|\d+(?:\.\d+)*", spaced))


def _by_name(
    name: str, found: Sequence[tuple[Family, PublishedModel]]
) -> tuple[tuple[Family, PublishedModel], ...]:
    """Models of one architecture, whose tensors are called the same, by how well a file's name
    fits their own."""
    told, own = _words(name), [_words(model.hub_id.partition("/")[2]) for _, model in found]
    common = own[0].intersection(*own)
    if not told & own[0].union(*own):
        return tuple(found)
    fits = [(-len(words & told - common), len(words - told - common)) for words in own]
    return tuple(found[number] for number in sorted(range(len(found)), key=fits.__getitem__))


def named_expert(name: str, family: Family) -> str | None:
    """The expert of a family that a file's name tells of; None if the family has none.

    Raises InvalidInput if the family has experts, and the name does not tell of one alone: they
    look the same.
    """
    told = [expert for expert in family.experts if expert.partition("-")[0] in _words(name)]
    if family.experts and len(told) != 1:
        raise InvalidInput(
            f"the name of {name} does not say which of {family.name}'s transformers it is",
            hint=f"say it: {' or '.join(f'--expert {expert}' for expert in family.experts)}",
        )
    return told[0] if told else None


def _may_be(source: WeightSource, family: Family) -> bool:
    """Whether the file's names begin as those of the family's class: much quicker than to look
    at all shapes."""
    config, first_names = _config_and_first_names(family)
    try:
        names = single_file.first_names(source, family.transformer_class, config)
    except BadWeights:
        return False
    return first_names <= names


@cache
def _config_and_first_names(family: Family) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The whole configuration of the family's transformer, and how its tensors' names begin."""
    tiny = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    config = {**tiny.config, **family.transformer_config}
    return config, frozenset(name.partition(".")[0] for name in tiny.state_dict())


NOT_KNOWN = (
    "a DiT or UNet of `autotune models` is understood; if it is one of other sizes, name "
    "its "
    "folder: --base"
)


def _describe(source: WeightSource, refusals: Mapping[str, BadWeights]) -> str:
    """What speaks against the file: that it is something else, or what its nearest model lacks."""
    names = list(source.locations)
    if any(".lora_" in name or "_lora." in name for name in names):
        return "it is an adapter"
    for name, error in refusals.items():
        return f"compared with {name}, {error.message}"
    return f"its tensors are called {', '.join(names[:2]) or 'nothing'} ..."


def find_config(
    source: WeightSource, family: Family, configs: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The first of the configurations whose transformer is in the file. Raises BadWeights if
    none is."""
    from autotune.weights.stream import check_source

    refusal: BadWeights | None = None
    for config in configs:
        try:
            check_source(*_view(source, family, config))
        except BadWeights as error:
            refusal = refusal or error
        else:
            return config
    if refusal is None:
        raise InvalidInput(
            f"nothing says how a {family.name} is built", hint="name a folder with --base"
        )
    raise refusal


def _view(
    source: WeightSource, family: Family, config: Mapping[str, Any]
) -> tuple[Any, WeightSource]:
    transformer = build_on_meta(family, config)
    return transformer, view_as(source, transformer)


OPTIONS = {"vae": ("--vae", "vae"), "text_encoder": ("--text-encoder", "text_encoders")}
"""By component: the option that names its file, and its folder below ComfyUI's `models`."""


def named_parts(file: Path, ref: ModelRef) -> tuple[Path | None, list[Path]]:
    """Files or folders of the VAE and of the text encoders that the user named beside a single
    `file`.

    Raises MissingWeights if one is absent.
    """

    def find(name: str, path: str) -> Path:
        found = Path(os.path.expanduser(path))  # noqa: PTH111
        if not found.exists():
            raise MissingWeights(f"{found} does not exist", hint=where_usually(file, name))
        return found

    vae = find("vae", ref.vae) if ref.vae else None
    return vae, [find("text_encoder", path) for path in ref.text_encoders]


def find_parts(
    source: WeightSource,
    family: Family,
    vae: Path | None,
    encoders: Sequence[Path],
    folder: Path | None,
) -> dict[str, Path]:
    """Files and folders of weights of VAE and text encoders, by component; those that are in the
    base are left out.

    Args:
        source: the file of the DiT or UNet, which may be a checkpoint that holds them too.
        vae, encoders: from `named_parts`.
        folder: the base, whose configurations tell which of several text encoders a file is; None
            if it is not here.

    Raises InvalidInput or BadWeights if a file is no text encoder of the family.
    """
    names = family.text_encoders
    found = {name: source.path for name in ("vae", *names) if has_part(source, name)}
    if len(encoders) > len(names):
        hint = f"give --text-encoder at most {len(names)} time(s)"
        raise InvalidInput(
            f"{family.name} has {len(names)} text encoder(s), not {len(encoders)}", hint=hint
        )
    found |= {"vae": vae} if vae else {}
    return found | (
        _assign(encoders, names, folder)
        if folder and len(names) > 1
        else dict(zip(names, encoders, strict=False))
    )


def _assign(files: Sequence[Path], names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Each file with the text encoder that it suits."""
    from autotune.weights.stream import check_part

    found: dict[str, Path] = {}
    for path in files:
        fitting: list[str] = []
        refusals: list[BadWeights] = []
        for name in names:
            try:
                check_part(folder, name, path)
            except BadWeights as error:
                refusals.append(error)
            else:
                fitting.append(name)
        if not fitting:
            raise refusals[0]
        free = [name for name in fitting if name not in found]
        if not free:
            raise InvalidInput(f"{path} is the same text encoder as another", hint="name each once")
        found[free[0]] = path
    return found


def where_usually(file: Path, name: str) -> str:
    """The option that names a component's file, and where such a file usually lies beside
    `file`, in ComfyUI."""
    option, place = OPTIONS["vae" if name == "vae" else "text_encoder"]
    models = next(
        (parent for parent in file.absolute().parents if parent.name == "models"), Path("models")
    )
    return f"name its file: {option} FILE; in a ComfyUI folder it usually lies in {models / place}"
