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
from autotune.weights.sources import open_source
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


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """(library, class) of a component, as the folder's `model_index.json` says.

    Raises:
        InvalidInput: the file cannot be read.
        MissingWeights: it says nothing, or names a library that is not imported for weights.
    """
    try:
        library, class_name = read_config(folder / "model_index.json")[name]
    except (ValueError, KeyError, TypeError) as error:
        raise MissingWeights(
            f"{folder / 'model_index.json'} does not say what {name} is ({type(error).__name__})", hint=DOWNLOAD_AGAIN
        ) from error
    if library not in LIBRARIES or not isinstance(class_name, str):
        message = f"{name} in {folder} is {library}.{class_name}, which is not a class of diffusers or transformers"
        raise MissingWeights(message, hint="use the published pipeline: code from elsewhere is never run")
    return library, class_name


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
