"""Load one component of a pipeline's folder, a text encoder or a VAE, by the same loaders and
streaming as the rest."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.errors import first_line
from autotune.weights.configs import DOWNLOAD_AGAIN, component_class, read_config
from autotune.weights.files import BadWeights, WeightSource, open_weights
from autotune.weights.single_file import view_part
from autotune.weights.streaming import (
    DtypePolicy,
    Rename,
    Transform,
    build_empty,
    check_source,
    from_pretrained_dtypes,
    load_into,
    transformers_renaming,
)


def build_empty_component(folder: Path, name: str, *, dtype: torch.dtype) -> nn.Module:
    """Build the component without weights, from its configuration.

    Raises:
        InvalidInput: its configuration cannot be read.
        BadWeights: `model_index.json` names no class for it, or that class does not take the
            configuration.
    """
    library, class_name = component_class(folder, name)
    read_config(folder / name / "config.json")
    try:
        cls: Any = getattr(importlib.import_module(library), class_name)
        if not issubclass(cls, nn.Module):
            raise TypeError("it is no model")
        if library != "transformers":
            config, build = cls.load_config(folder / name), cls.from_config
        else:
            config, build = cls.config_class.from_pretrained(folder / name), cls
        model: nn.Module = build_empty(lambda: build(config), dtype=dtype)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            raise
        raise BadWeights(
            f"the configuration in {folder / name} does not build a {class_name}: {reason}",
            hint=DOWNLOAD_AGAIN,
        ) from error
    return model


def _open(
    folder: Path, name: str, path: Path, dtype: torch.dtype
) -> tuple[nn.Module, WeightSource, Rename | None]:
    """The empty component, its weights in a folder or a single file at `path`, and how these are
    to be renamed."""
    model, source = build_empty_component(folder, name, dtype=dtype), open_weights(path)
    if path.is_file() and path.suffix == ".safetensors":
        source = view_part(source, name, model)
    library, _ = component_class(folder, name)
    return model, source, transformers_renaming(model) if library == "transformers" else None


def check_part(folder: Path, name: str, path: Path) -> WeightSource:
    """The weights of `folder`'s component `name` in a file or folder elsewhere, under the names
    that are stored there.

    Raises InvalidInput or BadWeights as `load_component`.
    """
    model, source, rename = _open(folder, name, path, torch.float32)
    check_source(model, source, rename)
    return source


def load_component(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    loader: str = "safetensors",
    transform: Callable[[nn.Module], Transform | None] = lambda model: None,
    weights: Path | None = None,
    casts: bool = True,
) -> Any:
    """Load what `from_pretrained` returns for `folder/name`, streamed onto `device`.

    `weights` is a file or folder that has the weights, if `folder/name` has the configuration
    alone. `transform` gets the empty model and returns what to do with each module as it arrives.
    Without `casts` weights stay as they are stored.

    Raises InvalidInput or BadWeights as `build_empty_component`, and for weights that are absent,
    damaged or of another model.
    """
    model, source, rename = _open(folder, name, weights or folder / name, dtype)
    policy: DtypePolicy = (
        from_pretrained_dtypes(model, dtype) if casts else lambda name, stored: stored
    )
    load_into(
        model,
        source,
        loader=loader,
        device=device,
        dtype_policy=policy,
        rename=rename,
        transform=transform(model),
    )
    return model
