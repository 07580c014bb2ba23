"""Write a whole model's weights anew in the layout that diffusers loads, in shards of another size."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.runtime import atomic_write
from autotune.weights.loaders import read_tensor
from autotune.weights.saving import MAX_SHARD_BYTES, save_shards
from autotune.weights.sources import PIPELINE_INDEX, STEMS, open_source, weights_in

if TYPE_CHECKING:
    from torch import Tensor

CONFIGS = ("config.json", "generation_config.json")
"""What lies beside a model's weights and is loaded with them."""


def is_whole_model(path: Path) -> bool:
    """Whether `path` is where a whole model would be, a folder or an index of shards; one file is an adapter's."""
    return path.is_dir() or path.suffix == ".json"


def reshard(source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[Path, ...]:
    """Copy the model in `source`, a component's folder or an index, into `folder`; returns the weight files written.

    Values and dtypes stay. One shard is in host memory at a time. The configuration beside the weights comes along.

    Raises:
        BadWeights: as `sources.open_source`.
        InvalidInput: `source` is a whole pipeline or holds an adapter; `folder` is a file, `source` or another model's.
    """
    if (source / PIPELINE_INDEX).is_file():
        raise InvalidInput(f"{source} is a whole pipeline", hint=f"name one component of it, e.g. {source}/transformer")
    weights = weights_in(source) if source.is_dir() else source
    if folder.is_file() or folder.suffix == ".safetensors":
        raise InvalidInput(f"{folder} is a file, but a model is written into a folder", hint="name a folder to write")
    if folder.resolve() == weights.parent.resolve():
        raise InvalidInput(f"{folder} is where the model is read from", hint="name another folder to write")
    for name in CONFIGS:
        own, there = weights.parent / name, folder / name
        if there.is_file() and not (own.is_file() and own.read_bytes() == there.read_bytes()):
            raise InvalidInput(f"{folder} holds another model", hint="name another folder to write")
    model = open_source(weights)
    places = model.places
    if any(".lora_" in name for name in places):
        raise InvalidInput(f"{source} holds an adapter, not a model", hint=f"name the file itself: {weights}")

    def read(names: list[str]) -> dict[str, "Tensor"]:
        return {name: read_tensor(*places[name]) for name in names}

    for name in CONFIGS:
        if (weights.parent / name).is_file():
            with atomic_write(folder / name) as part:
                shutil.copyfile(weights.parent / name, part)
    sizes = {name: entry.size_bytes for name, (_, entry) in places.items()}
    # Shards are named as the source names them, e.g. `model` in a text encoder, for readers look for that.
    stem = next((stem for stem in STEMS if weights.name.startswith(stem)), STEMS[0])
    return save_shards(folder, sizes, read, stem=stem, max_shard_bytes=max_shard_bytes, metadata=model.metadata)
