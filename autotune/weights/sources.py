"""Find the safetensors files of a model component: one file, or shards under an index, in the diffusers layout."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autotune.weights.errors import CorruptFile, MissingWeights
from autotune.weights.files import TensorEntry, WeightFile, read_file, refuse_pickle

STEMS = ("diffusion_pytorch_model", "model")
"""File stems in use: diffusers' components, then transformers'."""

PIPELINE_INDEX = "model_index.json"
"""What makes a folder or a repository a pipeline."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class WeightSource:
    """All tensors of one component, wherever they lie."""

    path: Path
    """The folder or file that the user named."""
    files: tuple[WeightFile, ...]

    @cached_property
    def places(self) -> dict[str, tuple[WeightFile, TensorEntry]]:
        """Every tensor's file and entry, by name, in reading order."""
        return {entry.name: (file, entry) for file in self.files for entry in file.entries}

    @property
    def metadata(self) -> dict[str, str]:
        """Of all files."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def __iter__(self) -> Iterator[tuple[WeightFile, TensorEntry]]:
        """Entries in reading order: file by file, by offset."""
        return iter(self.places.values())


def open_source(path: Path) -> WeightSource:
    """The weights in `path`: a safetensors file, an index, or a component's folder (`transformer/`, `vae/` ...).

    Only headers are read. Where a folder holds plain files and variants (`.fp16.`), the plain ones are taken.

    Raises:
        MissingWeights: nothing there, or a shard that the index names is absent.
        PickledWeights: only pickled files there.
        CorruptFile, TruncatedFile, HeaderTooLarge: a file is damaged, or an index points outside its folder.
    """
    if path.suffix == ".json":
        return WeightSource(path, _shards(path))
    if not path.is_dir():
        return WeightSource(path, (read_file(path),))
    found = weights_in(path)
    return WeightSource(path, open_source(found).files)


def weights_in(folder: Path) -> Path:
    """The index or the single file that holds a folder's weights."""
    for stem in STEMS:
        for suffix in (".safetensors.index.json", ".safetensors"):
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    variants = sorted(folder.glob("*.safetensors.index.*json")) or sorted(folder.glob("*.safetensors"))
    if len(variants) == 1:
        return variants[0]
    if not variants:
        for pattern in PICKLES:
            for pickled in sorted(folder.glob(pattern)):
                refuse_pickle(pickled)
    found = ", ".join(variant.name for variant in variants) or "nothing"
    message = f"{folder} holds no weights under a known name (found {found})"
    hint = f"name one file, or expect {STEMS[0]}.safetensors or {STEMS[1]}.safetensors there"
    raise MissingWeights(message, hint=hint)


def _shards(index: Path) -> tuple[WeightFile, ...]:
    weight_map = read_index(index)
    files = []
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise MissingWeights(f"{index} names {shard}, which is not there", hint=f"fetch {shard} into {path.parent}")
        file = read_file(path)
        wanted = {name for name, place in weight_map.items() if place == shard}
        lost = sorted(wanted - set(file.by_name))
        if lost:
            message = f"{index} looks for {lost[0]!r} in {shard}, which does not hold it ({len(lost)} such)"
            raise CorruptFile(message, hint="index and shards are of different saves: fetch or save all of them again")
        entries = tuple(entry for entry in file.entries if entry.name in wanted)
        files.append(WeightFile(file.path, file.size_bytes, entries, file.metadata))
    return tuple(files)


def read_index(index: Path) -> dict[str, str]:
    """The index's table: tensor name to the name of a shard beside it. Raises CorruptFile, also for any other path."""
    hint = "fetch the index again, or save the model again"
    try:
        document = json.loads(index.read_bytes())
        weight_map: dict[str, str] = document["weight_map"]
        sound = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFile(f"{index} is no index of shards ({type(error).__name__}: {error})", hint=hint) from error
    if not sound:
        raise CorruptFile(f"{index} is no index of shards: weight_map is not a table of file names", hint=hint)
    for shard in set(weight_map.values()):
        # The name alone decides: the hub's cache keeps symbolic links, so where a path resolves to says nothing.
        if not shard.endswith(".safetensors") or any(mark in shard for mark in ("/", "\\", ":", "\0")):
            raise CorruptFile(f"{index} points at {shard!r}, which is no safetensors file beside it", hint=hint)
    return weight_map
