"""From what the user calls a model to what it is: its family, its configuration, its size, its files."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, first_line, suggest_nearest
from autotune.families.base import Family, Parts
from autotune.families.registry import FAMILIES
from autotune.schema import ModelSpec, digest_of
from autotune.weights import (
    build_empty_component,
    component_class,
    fetch,
    missing_files,
    open_weights,
    read_config,
    read_model_index,
    snapshot_in_cache,
)

CHECK_CONFIG = "check transformer/config.json, or update diffusers"
REPO = re.compile(r"[\w.-]+/[\w.-]+")
"""A repository's name on the hub."""
REVISION = re.compile(r"\w[\w./-]*")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be built: its family, its transformer's configuration and, where at hand, its files."""

    family: Family
    config: Mapping[str, Any]
    """Constructor arguments of the transformer."""
    spec: ModelSpec
    folder: Path | None
    """Folder in the diffusers layout with all weights, or None when they are not at hand."""
    texts: Path | None = None
    """Folder with configurations and tokenizers, or None when only the architecture is known."""
    revision: str | None = None
    """Commit on the hub that the files are of."""

    @property
    def weights(self) -> Path:
        """The folder. Raises InvalidInput where the weights are not on this machine."""
        if self.folder is None:
            raise InvalidInput(
                f"the weights of {self.spec.name} are not on this machine",
                hint="`autotune train` fetches them; or pass a folder that has them: --model FOLDER",
            )
        return self.folder


def resolve_model(model: str) -> ResolvedModel:
    """Find out what `model` is, from what is on this machine: the network is not asked.

    It may be a folder in the diffusers layout, a family's name, or a hub id; the last two with `@REVISION` where a
    certain commit is meant, whose files are then taken from the hub's cache.

    Raises:
        InvalidInput: it is none of these, or the folder lacks something or belongs to no known family.
    """
    folder = _folder(model)
    if folder.is_dir():
        return _from_folder(folder, folder.resolve().name)
    name, revision = _at_revision(model)
    family = _named(name)
    repo = family.hub_id if family else name
    snapshot = (
        snapshot_in_cache(repo, revision or "main") if (revision or not family) and REPO.fullmatch(repo) else None
    )
    if snapshot is not None:
        return _from_folder(snapshot, repo, snapshot.name)
    if family is None:
        hint = f"{suggest_nearest(model, FAMILIES)}; or a hub id, owner/name"
        raise InvalidInput(f"{model!r} is neither a folder nor a known model", hint=hint)
    return ResolvedModel(family, family.transformer_config, _spec(family, family.transformer_config, repo), None)


def fetch_model(model: str, *, weights: bool = True) -> ResolvedModel:
    """`resolve_model` after bringing the model's files from the hub, where it is no folder.

    Without `weights`, configurations and tokenizers alone: some megabytes.

    Raises:
        InvalidInput: as `resolve_model`.
        HubError, MissingWeights, PickledWeights: it cannot be fetched, and is not whole in the local cache.
    """
    if _folder(model).is_dir():
        return resolve_model(model)
    name, revision = _at_revision(model)
    family = _named(name)
    repo = family.hub_id if family else name
    if not REPO.fullmatch(repo):
        return resolve_model(model)
    if family is None:  # what it is made of is said in the repository itself
        index = fetch(repo, revision=revision or "main", components=())
        family, revision = _family_of(index), index.name
    folder = fetch(repo, revision=revision or "main", components=family.components, weights=weights)
    return _from_folder(folder, repo, folder.name)


def is_on_hub(model: str) -> bool:
    """Whether `model` names something on the hub rather than a folder."""
    return not _folder(model).is_dir()


def _folder(model: str) -> Path:
    return Path(os.path.expanduser(model))  # noqa: PTH111  Path's raises for a user that there is not


def _at_revision(model: str) -> tuple[str, str]:
    """Name and revision, which is empty where none is given.

    Raises:
        InvalidInput: git has no such revision; joined to the cache's folder it might lead out of it.
    """
    name, at, revision = model.partition("@")
    if at and (not REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidInput(f"{revision!r} is no revision of {name}", hint="name a commit, branch or tag after the @")
    return name, revision


def is_family(model: str) -> bool:
    """Whether `model` names a known family, whose architecture needs no file."""
    return _named(model) is not None


def _named(name: str) -> Family | None:
    return next((family for family in FAMILIES.values() if name in (family.name, family.hub_id)), None)


def require_weights(model: ResolvedModel) -> None:
    """Read the headers of all weights in the model's folder: damage shows now, not after an hour of work.

    Raises:
        InvalidInput: the weights are not on this machine.
        BadWeights: a file is missing, cut off or damaged.
    """
    for part in ("transformer", "vae", *model.family.text_encoders):
        open_weights(model.weights / part)


def parts_of(model: ResolvedModel) -> Parts | None:
    """The models around the transformer, from headers and configurations in its folder.

    Without a folder those of the published model, where it is that one; else None.

    Raises:
        InvalidInput: the folder's VAE cannot be built.
    """
    import torch

    family = model.family
    if model.folder is None:
        published = _spec(family, family.transformer_config, model.spec.name) == model.spec
        return family.parts if published else None
    vae_class = component_class(model.folder, "vae")[1]
    with torch.device("meta"):
        build_empty_component(model.folder, "vae", dtype=torch.float32)
    config = read_config(model.folder / "vae" / "config.json")
    return Parts(
        text_encoder_parameters=tuple(_num_parameters(model.folder / name) for name in family.text_encoders),
        vae_class=vae_class,
        vae_config={key: value for key, value in config.items() if not key.startswith("_")},
    )


def _num_parameters(folder: Path) -> int:
    return sum(math.prod(entry.shape) for _, entry in open_weights(folder))


def _from_folder(folder: Path, name: str, revision: str | None = None) -> ResolvedModel:
    family = _family_of(folder)
    for part in family.components:
        if not (folder / part).is_dir():
            raise InvalidInput(
                f"the model folder {folder} is incomplete: it has no {part}/",
                hint="download the whole model again; a pipeline in the diffusers layout has one folder per component",
            )
    config = {k: v for k, v in read_config(folder / "transformer" / "config.json").items() if not k.startswith("_")}
    whole = revision is None or not missing_files(folder, family.components)
    return ResolvedModel(
        family, config, _spec(family, config, name), folder if whole else None, texts=folder, revision=revision
    )


def _family_of(folder: Path) -> Family:
    pipeline = read_model_index(folder).get("_class_name")
    family = next((family for family in FAMILIES.values() if family.pipeline_class == pipeline), None)
    if family is None:
        known = ", ".join(sorted(f.pipeline_class for f in FAMILIES.values()))
        raise InvalidInput(f"{folder} holds a {pipeline}, which no family here can train", hint=f"known: {known}")
    return family


def _spec(family: Family, config: Mapping[str, Any], name: str) -> ModelSpec:
    transformer = build_on_meta(family, config)
    if not len(family.blocks(transformer)):
        raise InvalidInput(
            f"the transformer's configuration builds a {family.transformer_class} without blocks", hint=CHECK_CONFIG
        )
    full = {key: value for key, value in transformer.config.items() if not key.startswith("_")}
    return ModelSpec(
        family=family.name,
        architecture=digest_of({"class": family.transformer_class, "config": json.loads(json.dumps(full))}),
        num_parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        num_blocks=len(family.blocks(transformer)),
        name=name,
    )


def build_on_meta(family: Family, config: Mapping[str, Any]) -> Any:
    """The transformer without storage: every parameter and buffer on the meta device.

    Raises:
        InvalidInput: the class refuses the configuration.
    """
    import diffusers
    import torch

    getattr(diffusers, family.transformer_class)  # what keeps it from being imported is no fault of the configuration
    try:
        with torch.device("meta"):
            return family.build_transformer(config)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        raise InvalidInput(
            f"the transformer's configuration does not build a {family.transformer_class}: {reason}",
            hint=CHECK_CONFIG,
        ) from error
