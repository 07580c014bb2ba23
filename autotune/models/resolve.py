"""Models by the names that users give them: their family, configuration, size and files.

What is wrong with a name or a folder is told before torch is imported; building the model takes it.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.events import OnEvent, StatusChanged
from autotune.models import single_file
from autotune.models.facts import Config, Parts, PublishedModel
from autotune.models.family import CHECK_CONFIG, Family, build_on_meta, public_config
from autotune.models.noise import NoiseProcess
from autotune.models.registry import FAMILIES, explain_unknown, find_published
from autotune.plan.base import Frozen, NaturalInt, digest_of, log_event
from autotune.plan.job import ModelRef
from autotune.plan.workload import ModelSpec
from autotune.weights import files
from autotune.weights.hub import fetch as fetch_files, missing_files, snapshot_in_cache, verify
from autotune.weights.single_file import view_as

REPO = re.compile(r"[\w.-]+/[\w.-]+")  # the name of a repository on the hub
REVISION = re.compile(r"\w[\w./-]*")
NAME_BASE = (
    "name a folder or hub id in the diffusers layout with --base; it needs VAE, text encoders and "
    "tokenizers, not the transformer's weights"
)


def build_spec(family: Family, config: Config, name: str) -> ModelSpec:
    """Build a model's record in plans. Raises InvalidInput as `build_on_meta`, or for no blocks."""
    return _build_spec(family, json.dumps(dict(config), default=dict)).changed(name=name)


@functools.lru_cache(maxsize=64)
def _build_spec(family: Family, config: str) -> ModelSpec:
    # It takes tenths of a second, and a command asks for it several times.
    transformer = build_on_meta(family, json.loads(config))
    num_blocks = len(family.blocks(transformer))
    if not num_blocks:
        what = f"the transformer's configuration builds a {family.transformer_class} without blocks"
        raise InvalidInput(what, hint=CHECK_CONFIG)
    full = json.loads(json.dumps(public_config(transformer.config)))
    return ModelSpec(
        family=family.name,
        architecture=digest_of({"class": family.transformer_class, "config": full}),
        num_parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        num_blocks=num_blocks,
        name=family.name,
    )


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be built, and if they are on disk its files."""

    family: Family
    config: Config  # constructor arguments of the transformer
    name: str  # name of the folder or file, or the hub id
    folder: Path | None  # in the diffusers layout with all weights, if they are on this machine
    config_folder: Path | None = None  # with configurations and tokenizers, if they are
    revision: str | None = None  # commit of the files on the hub
    file: Path | None = None  # the file that holds the transformer, if it is not in `folder`
    base: str | None = None  # folder or hub id that the other parts come from, if there is one
    # Weights of the VAE and text encoders that are not in `folder`, by component.
    part_files: Mapping[str, Path] = field(default_factory=dict)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return build_spec(self.family, self.config, self.name)

    @property
    def noise(self) -> NoiseProcess:
        """The process that its scheduler decides. Raises InvalidInput if that is unusable."""
        if self.config_folder is None:
            return self.family.noise
        path = self.config_folder / "scheduler" / "scheduler_config.json"
        if not os.path.lexists(path):  # whoever has no weights yet may lack it, too
            return self.family.noise
        scheduler = files.read_config(path)
        return self.family.noise_of(scheduler, files.read_model_index(self.config_folder))

    @property
    def weights(self) -> Path:
        """The folder with all weights. Raises InvalidInput if they are not on this machine."""
        if self.folder is None:
            raise InvalidInput(
                f"the weights of {self.name} are not on this machine",
                hint="`autotune train` fetches them; or pass a folder that has them: "
                "--model FOLDER",
            )
        return self.folder

    @property
    def transformer_file(self) -> Path:
        return self.file or self.weights / self.family.denoiser

    def open_transformer(self) -> files.WeightSource:
        """Open the transformer's weights under the names of its class."""
        source = files.open_weights(self.transformer_file)
        return view_as(source, build_on_meta(self.family, self.config)) if self.file else source


def refuse_parts(ref: ModelRef, given: Collection[str]) -> None:
    """Raise InvalidInput if parts are among the fields that are `given` for a whole model."""
    if {"base", "vae", "text_encoders"} & set(given) and not is_single_file(ref):
        what = f"{ref.name} is not a single file, so it takes no base, VAE or text encoders"
        raise InvalidInput(what, hint="leave them out: a folder has them all")


def resolve_model(ref: ModelRef) -> ResolvedModel:
    """Find out what a model is, from what is on this machine, without the network. It may be a
    folder in the diffusers layout, a single file, a known name, or a hub id; the last two with
    `@REVISION` for a commit in the hub's cache. Raises InvalidInput for anything else."""
    if is_single_file(ref):
        return _resolve_single_file(ref, lambda base, _: _locate(base))
    if not is_on_hub(ref):
        folder = _expand(ref.name)
        return _resolve_folder(folder, Path(os.path.realpath(folder)).name, expert=ref.expert)
    found, repo, revision = _parse_name(ref)
    is_cached = bool(revision or not found) and REPO.fullmatch(repo)
    snapshot = snapshot_in_cache(repo, revision or "main") if is_cached else None
    if snapshot is not None:
        return _resolve_folder(snapshot, repo, snapshot.name, ref.expert)
    if found is None:
        raise explain_unknown(ref.name)
    family, published = found
    return ResolvedModel(family, published.config, repo, None)


def fetch_model(ref: ModelRef, *, weights: bool = True) -> ResolvedModel:
    """Download the model's files from the hub and resolve it; without `weights` texts alone."""
    if not is_on_hub(ref):
        return resolve_model(ref)
    if is_single_file(ref):
        return _resolve_single_file(
            ref, lambda base, find: _fetch_base(base, find if weights else None)
        )
    _, repo, _ = _parse_name(ref)
    if not REPO.fullmatch(repo):
        return resolve_model(ref)
    family, revision = _fetch_index(ref)
    folder = fetch_files(repo, revision=revision, components=family.components, weights=weights)
    return _resolve_folder(folder, repo, folder.name, ref.expert)


class FetchedModel(Frozen):
    """A model of the hub that is on this machine.

    Examples:
        >>> model = autotune.fetch("qwen-image")
        >>> plan = autotune.plan(str(model.folder), "photos")
    """

    name: str
    """Hub id of the model."""
    family: str
    revision: str
    """Commit on the hub; `NAME@REVISION` means exactly these files."""
    folder: Path
    """Its folder in the hub's cache."""
    size_bytes: int = NaturalInt
    num_verified: int | None
    """Number of files that have the hub's checksums; None if the hub was out of reach."""


def fetch(model: str, *, on_event: OnEvent = log_event) -> FetchedModel:
    """Download all files of a model that training needs, and compare them with the hub's checksums.

    Afterwards `plan` and `train` need no network. License, token and free disk space are checked
    first; files that arrived whole are not downloaded again.

    Args:
        model: a known name or a hub id, with `@REVISION` for a certain commit.
        on_event: listener to progress.

    Raises:
        InvalidInput: there is no such model, it is not on the hub, or its license is not accepted.
        AutotuneError: a file is damaged, the connection broke, or the disk has too little room; the
            message says what.

    Examples:
        >>> autotune.fetch("qwen-image").folder
    """
    ref = ModelRef.of(model)
    if not is_on_hub(ref):
        what = f"{model} is on this machine: there is nothing to fetch"
        raise InvalidInput(what, hint="name a model of the hub")
    on_event(StatusChanged(text=f"fetching {model}"))
    found = fetch_model(ref)
    if found.revision is None:  # neither known nor a repository's name
        raise InvalidInput(f"{model} is not on the hub", hint="name a model of the hub: owner/name")
    on_event(StatusChanged(text="comparing checksums"))
    paths = [path for path in found.weights.rglob("*") if path.is_file()]
    return FetchedModel(
        name=found.spec.name,
        family=found.family.name,
        revision=found.revision,
        folder=found.weights,
        size_bytes=sum(path.stat().st_size for path in paths),
        num_verified=verify(found.spec.name, found.weights),
    )


def is_on_hub(ref: ModelRef) -> bool:
    """Return whether a model, or the base of a single file, is something on the hub."""
    if is_single_file(ref):
        base = _base_of(ref)
        return base is None or is_on_hub(base)
    return not _expand(ref.name).is_dir()


def is_fetchable(ref: ModelRef) -> bool:
    """Return whether such a name is known, or `owner/name`."""
    origin = _base_of(ref) if is_single_file(ref) else ref
    return is_on_hub(ref) and (not origin or REPO.fullmatch(_parse_name(origin)[1]) is not None)


def is_single_file(ref: ModelRef) -> bool:
    """Return whether a model is a file rather than a folder or something on the hub."""
    path = _expand(ref.name)
    return path.suffix in single_file.SUFFIXES and not path.is_dir()


def check_weights(model: ResolvedModel) -> None:
    """Read the headers of all weights, so that damage shows now, else raise InvalidInput."""
    family = model.family
    for part in (*family.decoders, *family.text_encoders, *family.other_denoisers):
        _open_part(model, part)
    files.open_weights(model.transformer_file)
    if model.config_folder and "scheduler" in family.components:
        files.read_config(model.config_folder / "scheduler" / "scheduler_config.json")


def read_parts(model: ResolvedModel) -> Parts | None:
    """Read the models around the transformer; without a folder, the published model's."""
    import torch

    from autotune.weights.empty import build_empty_component

    family, folder = model.family, model.folder
    if folder is None:
        specs = ((each, build_spec(family, each.config, model.name)) for each in family.models)
        return next((each.parts for each, spec in specs if spec == model.spec), None)
    with torch.device("meta"):
        build_empty_component(folder, "vae", dtype=torch.float32)
    others = [name for name in family.decoders if name != "vae"]
    encoders = tuple(_num_parameters(model, name) for name in family.text_encoders)
    known = (each.parts for each in family.models if each.parts.text_encoder_parameters == encoders)
    return Parts(
        encoders,
        next(known, Parts()).caption_bytes,
        files.component_class(folder, "vae")[1],
        public_config(files.read_config(folder / "vae" / "config.json")),
        sum(_num_parameters(model, name) for name in others),
    )


def _num_parameters(model: ResolvedModel, part: str) -> int:
    return sum(math.prod(entry.shape) for _, entry in _open_part(model, part).locations.values())


def _open_part(model: ResolvedModel, name: str) -> files.WeightSource:
    if (path := model.part_files.get(name)) is not None:
        from autotune.weights.stream import check_part

        return check_part(model.weights, name, path)
    try:
        return files.open_weights(model.weights / name)
    except files.MissingWeights as error:
        if model.file is None:
            raise
        raise files.MissingWeights(
            f"the weights of the {name} are missing: neither {model.file} nor "
            f"{model.weights / name} has them",
            hint=single_file.where_usually(model.file, name),
        ) from error


def _expand(model: str) -> Path:
    return Path(os.path.expanduser(model))  # noqa: PTH111  Path's raises for a user that does not exist


def _parse_name(ref: ModelRef) -> tuple[tuple[Family, PublishedModel] | None, str, str]:
    name, at, revision = ref.name.partition("@")
    revision = ref.revision or revision
    # It is joined to the cache's folder, and might leave it.
    if (at or revision) and (not REVISION.fullmatch(revision) or ".." in revision):
        what = f"{revision!r} is not a revision of {name}"
        raise InvalidInput(what, hint="name a commit, branch or tag after the @")
    found = find_published(name, ref.expert)
    return found, found[1].hub_id if found else name, revision


def _resolve_folder(
    folder: Path, name: str, revision: str | None = None, expert: str | None = None
) -> ResolvedModel:
    family = _detect_family(folder).with_expert(expert)
    for part in family.components:
        if not (folder / part).is_dir():
            raise InvalidInput(
                f"the model folder {folder} is incomplete: it has no {part}/",
                hint="download the whole model again; a pipeline in the diffusers layout has one "
                "folder per component",
            )
        files.require_bounded(folder / part)
    config = public_config(files.read_config(folder / family.denoiser / "config.json"))
    is_complete = revision is None or not missing_files(folder, family.components)
    return ResolvedModel(family, config, name, folder if is_complete else None, folder, revision)


def _detect_family(folder: Path) -> Family:
    index = files.read_model_index(folder)
    pipeline, alike = index.get("_class_name"), []
    for family in FAMILIES.values():
        if family.is_pipeline(index):
            return family
        if family.pipeline_class == pipeline:
            alike.append(family.name)
    if alike:
        raise InvalidInput(
            f"{folder} holds a {pipeline} of another kind than {' and '.join(alike)}, by its "
            "model_index.json",
            hint=f"use one of them: --model {alike[0]}",
        )
    known = sorted({family.pipeline_class for family in FAMILIES.values()})
    what = f"{folder} holds a {pipeline}, and no known family has that pipeline"
    raise InvalidInput(what, hint=f"known: {', '.join(known)}")


FindParts = Callable[[Family, Path | None], Mapping[str, Path]]
"""Finds the files of weights that are not in a base, for its family and folder."""


def _base_of(ref: ModelRef) -> ModelRef | None:
    return ModelRef(name=ref.base, revision=ref.revision) if ref.base else None


def _resolve_single_file(
    ref: ModelRef, locate: Callable[[ModelRef, FindParts], Path | None]
) -> ResolvedModel:
    # `locate` finds the folder of its base, if that is here.
    source = single_file.open_single_file(_expand(ref.name))
    file = Path(os.path.realpath(source.path))
    vae, encoders = single_file.named_parts(source.path, ref)
    base = _base_of(ref) or ModelRef(
        name=single_file.recognize(source)[0][1].hub_id, revision=ref.revision
    )

    def find(family: Family, folder: Path | None) -> Mapping[str, Path]:
        return single_file.find_parts(source, family, vae, encoders, folder)

    folder, on_hub, base_name = locate(base, find), is_on_hub(base), base.name.partition("@")[0]
    known = find_published(base_name)
    if folder:
        family = _detect_family(folder)
    elif known:
        family = known[0]
    else:
        what = f"the base {base.name} is neither a folder nor on this machine"
        raise InvalidInput(what, hint=NAME_BASE)
    family = family.with_expert(ref.expert or single_file.named_expert(file.stem, family))
    configs = [published.config for published in family.models]
    if folder and (path := folder / family.denoiser / "config.json").is_file():
        configs.insert(0, public_config(files.read_config(path)))
    config = single_file.find_config(source, family, configs)
    others = [part for part in family.components if part != family.denoiser]
    lacking = [part for part in others if folder and not (folder / part).is_dir()]
    if lacking and not on_hub:
        raise InvalidInput(f"the base {folder} has no {lacking[0]}/", hint=NAME_BASE)
    config_folder = None if lacking else folder
    part_files = find(family, config_folder)
    is_complete = config_folder and not (
        on_hub and missing_files(config_folder, _in_base(family, part_files))
    )
    return ResolvedModel(
        family,
        config,
        Path(ref.name).stem,
        folder if is_complete else None,
        config_folder,
        revision=folder.name if folder and on_hub else None,
        file=file,
        base=base_name if on_hub else base.name,
        part_files=part_files,
    )


def _locate(base: ModelRef) -> Path | None:
    if not is_on_hub(base):
        return _expand(base.name)
    _, repo, revision = _parse_name(base)
    return snapshot_in_cache(repo, revision or "main") if REPO.fullmatch(repo) else None


def _in_base(family: Family, part_files: Mapping[str, Path]) -> list[str]:
    return [name for name in family.components if name not in (family.denoiser, *part_files)]


def _fetch_base(base: ModelRef, find: FindParts | None) -> Path | None:
    repo = _parse_name(base)[1]
    try:
        family, revision = _fetch_index(base)
        folder = fetch_files(repo, revision=revision, components=family.components, weights=False)
        if find:
            components = _in_base(family, find(family, folder))
            folder = fetch_files(repo, revision=folder.name, components=components)
    except files.BadWeights as error:
        raise type(error)(
            f"{error.message}; the file's other parts come from there",
            hint=f"{error.hint}; or {NAME_BASE}",
        ) from error
    return folder


def _fetch_index(ref: ModelRef) -> tuple[Family, str]:
    """Family and revision of a repository, whose own index says its parts if it is unknown."""
    found, repo, revision = _parse_name(ref)
    if found:
        return found[0], revision or "main"
    index = fetch_files(repo, revision=revision or "main", components=())
    return _detect_family(index), index.name
