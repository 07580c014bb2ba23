"""Load one component of a pipeline's folder, a text encoder or a VAE, by the same loaders and streaming as the rest."""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput, first_line
from autotune.weights.building import build_empty, dtype_of_from_pretrained, names_in_transformers
from autotune.weights.errors import BadWeights, MissingWeights
from autotune.weights.sources import PIPELINE_INDEX, open_source
from autotune.weights.streaming import Transform, load_into

if TYPE_CHECKING:
    import torch
    from torch import nn

LIBRARIES = ("diffusers", "transformers")
"""Where component classes may come from: a name in a folder of strangers must not import anything else."""

MAX_CONFIG_BYTES = 1 << 20
MAX_BLOCKS = 1000
"""Far above any model; building so many takes some seconds, and of a billion there would be no end."""

DOWNLOAD_AGAIN = "download the whole pipeline again, in the diffusers layout"


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder, not believed where what it says would take all memory to build.

    Raises:
        InvalidInput: it cannot be read, is no JSON object, or asks for more blocks than any model has.
    """
    hint = "point --model at a folder in the diffusers layout: model_index.json, transformer/, vae/ and so on"
    try:
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path} is no file", hint=hint)
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInput(f"{path} is too large to be a configuration", hint=hint)
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"cannot read {path}: {error}", hint=hint) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a JSON object", hint=hint)
    for name, value in _entries(data):
        if isinstance(value, int) and value > MAX_BLOCKS and re.search("layers|blocks", name):
            raise InvalidInput(f"{path} asks for {str(value)[:20]} {name}, more than any model has", hint=hint)
    return data


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        yield name, value
        if isinstance(value, dict):
            yield from _entries(value)


def read_pipeline(folder: Path) -> dict[str, Any]:
    """What `model_index.json` says of a pipeline: its class as `_class_name`, (library, class) of each component.

    Raises:
        InvalidInput: it cannot be read, or a component comes from a library that is not imported for strangers.
    """
    index = read_config(folder / PIPELINE_INDEX)
    for name, entry in index.items():
        if isinstance(entry, list) and entry[:1] not in ([None], *([library] for library in LIBRARIES)):
            raise InvalidInput(
                f"{name} in {folder} comes from {entry[0] if entry else 'nowhere'}, not from diffusers or transformers",
                hint="use the published pipeline: code from elsewhere is never run",
            )
    return index


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """(library, class) of a component, as `read_pipeline` has it.

    Raises:
        InvalidInput: as `read_pipeline`.
        MissingWeights: the pipeline has no such component.
    """
    match read_pipeline(folder).get(name):
        case [str(library), str(class_name)]:
            return library, class_name
    raise MissingWeights(f"{folder / PIPELINE_INDEX} does not say what {name} is", hint=DOWNLOAD_AGAIN)


def empty_component(folder: Path, name: str, *, dtype: "torch.dtype") -> "nn.Module":
    """The component without weights.

    Raises:
        InvalidInput: its configuration cannot be read.
        BadWeights: `model_index.json` names no class for it, or that class does not take the configuration.
    """
    library, class_name = component_class(folder, name)
    read_config(folder / name / "config.json")
    try:
        return _built(library, class_name, folder / name, dtype)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            raise
        raise BadWeights(
            f"the configuration in {folder / name} does not build a {class_name}: {reason}", hint=DOWNLOAD_AGAIN
        ) from error


def _built(library: str, class_name: str, folder: Path, dtype: "torch.dtype") -> "nn.Module":
    from torch import nn

    cls: Any = getattr(importlib.import_module(library), class_name)
    if not issubclass(cls, nn.Module):
        raise TypeError("it is no model")
    if library == "diffusers":
        config = cls.load_config(folder)
        model = build_empty(lambda: cls.from_config(config), dtype=dtype)
    else:
        config = cls.config_class.from_pretrained(folder)
        model = build_empty(lambda: cls(config), dtype=dtype)
    return model  # type: ignore[no-any-return]


def load_component(
    folder: Path,
    name: str,
    *,
    dtype: "torch.dtype",
    device: str = "cpu",
    loader: str = "safetensors",
    transform: "Callable[[nn.Module], Transform | None]" = lambda model: None,
) -> Any:
    """What `from_pretrained` gives for `folder/name`, streamed onto `device`.

    `transform` is asked with the empty model what to do with each module as it arrives.

    Raises:
        InvalidInput, BadWeights: as `empty_component`; no weights, or damaged ones, or of another model.
    """
    library, _ = component_class(folder, name)
    model = empty_component(folder, name, dtype=dtype)
    load_into(
        model,
        open_source(folder / name),
        loader=loader,
        device=device,
        dtype_policy=dtype_of_from_pretrained(model, dtype),
        rename=names_in_transformers(model) if library == "transformers" else None,
        transform=transform(model),
    )
    return model
