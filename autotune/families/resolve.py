"""From what the user calls a model to what it is: its family, its configuration, its size. Reads no weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.families.base import Family, Parts
from autotune.families.registry import FAMILIES
from autotune.schema import ModelSpec, digest_of
from autotune.weights.components import component_class
from autotune.weights.sources import open_source

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be built: its family, its transformer's configuration and, where at hand, its files."""

    family: Family
    config: Mapping[str, Any]
    """Constructor arguments of the transformer."""
    spec: ModelSpec
    folder: Path | None
    """Folder in the diffusers layout, or None when only the architecture is known."""


def resolve_model(model: str) -> ResolvedModel:
    """Find out what `model` is: a family's name, its hub id, or a folder in the diffusers layout.

    Raises:
        InvalidInput: it is none of these, or the folder lacks something or belongs to no known family.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _from_folder(folder)
    named = next((family for family in FAMILIES.values() if model in (family.name, family.hub_id)), None)
    if named is None:
        raise InvalidInput(
            f"{model!r} is neither a folder nor a known model", hint=f"known models: {', '.join(sorted(FAMILIES))}"
        )
    return ResolvedModel(named, named.transformer_config, _spec(named, named.transformer_config, named.hub_id), None)


def parts_of(model: ResolvedModel) -> Parts | None:
    """The models around the transformer, from headers and configurations in its folder; None without a folder."""
    if model.folder is None:
        return None
    encoders = [name for name in model.family.components if name.startswith("text_encoder")]
    vae_class = component_class(model.folder, "vae")[1]
    config = _read_json(model.folder / "vae" / "config.json")
    return Parts(
        text_encoder_parameters=tuple(_num_parameters(model.folder / name) for name in encoders),
        vae_class=vae_class,
        vae_config={key: value for key, value in config.items() if not key.startswith("_")},
    )


def _num_parameters(folder: Path) -> int:
    return sum(math.prod(entry.shape) for _, entry in open_source(folder))


def _from_folder(folder: Path) -> ResolvedModel:
    index = _read_json(folder / "model_index.json")
    pipeline = index.get("_class_name")
    family = next((family for family in FAMILIES.values() if family.pipeline_class == pipeline), None)
    if family is None:
        known = ", ".join(sorted(f.pipeline_class for f in FAMILIES.values()))
        raise InvalidInput(f"{folder} holds a {pipeline}, which no family here can train", hint=f"known: {known}")
    for part in family.components:
        if not (folder / part).is_dir():
            raise InvalidInput(
                f"the model folder {folder} is incomplete: it has no {part}/",
                hint="download the whole model again; a pipeline in the diffusers layout has one folder per component",
            )
    config = {k: v for k, v in _read_json(folder / "transformer" / "config.json").items() if not k.startswith("_")}
    return ResolvedModel(family, config, _spec(family, config, folder.resolve().name), folder)


def _read_json(path: Path) -> dict[str, Any]:
    hint = "point --model at a folder in the diffusers layout: model_index.json, transformer/, vae/ and so on"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInput(f"{path} is too large to be a configuration", hint=hint)
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}", hint=hint) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a JSON object", hint=hint)
    return data


def _spec(family: Family, config: Mapping[str, Any], name: str) -> ModelSpec:
    transformer = build_on_meta(family, config)
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
    import torch

    try:
        with torch.device("meta"):
            return family.build_transformer(config)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise InvalidInput(
            f"the transformer's configuration does not build a {family.transformer_class}: {error}",
            hint="check transformer/config.json, or update diffusers",
        ) from error
