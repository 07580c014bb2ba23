"""Write a whole model's weights anew in the layout that diffusers loads, in shards of another
size."""

import os
import shutil
from pathlib import Path

from torch import Tensor

from autotune.errors import InvalidInput
from autotune.system.files import atomic_write
from autotune.weights.files import PIPELINE_INDEX, STEMS, find_weights, open_weights
from autotune.weights.loaders import read_tensor
from autotune.weights.saving import MAX_SHARD_BYTES, save_shards

CONFIGS = ("config.json", "generation_config.json")
"""Files that are loaded together with a model's weights."""


def reshard(
    source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[Path, ...]:
    """Copy the model in `source`, a component's folder or an index, into `folder`; returns the
    weight files written.

    Values and dtypes stay. One shard is in host memory at a time. The configuration files are
    copied, too.

    Raises:
        BadWeights: as `sources.open_weights`.
        InvalidInput: `source` is a whole pipeline or holds an adapter; `folder` is a file, `source`
            or another model's.
    """
    if (source / PIPELINE_INDEX).is_file():
        raise InvalidInput(
            f"{source} is a whole pipeline",
            hint=f"name one component of it, e.g. {source}/transformer",
        )
    weights = find_weights(source) if source.is_dir() else source
    configs = [weights.parent / name for name in CONFIGS]
    _check_target(folder, weights.parent, configs)
    model = open_weights(weights)
    if any(".lora_" in name for name in model.locations):
        raise InvalidInput(
            f"{source} holds an adapter, not a model", hint=f"name the file itself: {weights}"
        )

    def read(names: list[str]) -> dict[str, Tensor]:
        return {name: read_tensor(*model.locations[name]) for name in names}

    for config in configs:
        if config.is_file():
            with atomic_write(folder / config.name) as part:
                shutil.copyfile(config, part)
    sizes = {entry.name: entry.size_bytes for _, entry in model}
    # Shards are named as the source names them, e.g. `model` in a text encoder, since readers look
    # for that.
    stem = next((stem for stem in STEMS if weights.name.startswith(stem)), STEMS[0])
    return save_shards(
        folder, sizes, read, stem=stem, max_shard_bytes=max_shard_bytes, metadata=model.metadata
    )


def _check_target(folder: Path, source: Path, configs: list[Path]) -> None:
    hint = "name another folder to write"
    if folder.is_file() or folder.suffix == ".safetensors":
        raise InvalidInput(
            f"{folder} is a file, but a model is written into a folder",
            hint="name a folder to write",
        )
    if os.path.realpath(folder) == os.path.realpath(source):
        raise InvalidInput(f"{folder} is where the model is read from", hint=hint)
    for config in configs:
        old = folder / config.name
        if old.is_file() and not (config.is_file() and config.read_bytes() == old.read_bytes()):
            raise InvalidInput(f"{folder} holds another model", hint=hint)
