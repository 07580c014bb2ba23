"""Load one component of a pipeline's folder, a text encoder or a VAE, by the same loaders and streaming as the rest."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.weights.building import build_empty, dtype_of_from_pretrained, names_in_transformers
from autotune.weights.errors import MissingWeights
from autotune.weights.sources import open_source
from autotune.weights.streaming import Transform, load_into

if TYPE_CHECKING:
    import torch
    from torch import nn

LIBRARIES = ("diffusers", "transformers")
"""Where component classes may come from: a name in a folder of strangers must not import anything else."""


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """(library, class) of a component, as the folder's `model_index.json` says.

    Raises:
        MissingWeights: it says nothing, or names a library that is not imported for weights.
    """
    try:
        library, class_name = json.loads((folder / "model_index.json").read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingWeights(
            f"{folder / 'model_index.json'} does not say what {name} is ({type(error).__name__})",
            hint="download the whole pipeline again, in the diffusers layout",
        ) from error
    if library not in LIBRARIES or not isinstance(class_name, str):
        message = f"{name} in {folder} is {library}.{class_name}, which is not a class of diffusers or transformers"
        raise MissingWeights(message, hint="use the published pipeline: code from elsewhere is never run")
    return library, class_name


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
        BadWeights: no class, no weights, or damaged ones, or of another model.
    """
    library, class_name = component_class(folder, name)
    cls = getattr(importlib.import_module(library), class_name)
    if library == "diffusers":
        config = cls.load_config(folder / name)
        model = build_empty(lambda: cls.from_config(config), dtype=dtype)
    else:
        config = cls.config_class.from_pretrained(folder / name)
        model = build_empty(lambda: cls(config), dtype=dtype)
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
