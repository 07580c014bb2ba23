"""Find the safetensors files of a model component: one file, or shards under an index, in the
diffusers layout.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from autotune.runtime import read_bounded
from autotune.weights.errors import CorruptFile, MissingWeights
from autotune.weights.files import (
    MAX_HEADER_BYTES,
    TensorEntry,
    WeightFile,
    read_header,
    refuse_pickle,
)

STEMS = ("diffusion_pytorch_model", "model")
"""File stems in use: diffusers' components, then transformers'."""

PIPELINE_INDEX = "model_index.json"
"""The file that makes a folder or a repository a pipeline."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


SAMPLE_BYTES = 4096
"""Bytes of each tensor that tell one model's weights from another's."""


@dataclass(frozen=True)
class WeightSource:
    """All tensors of one component, in one file or several."""

    path: Path
    """The folder or file that the user named."""
    files: tuple[WeightFile, ...]
    is_view: bool = False
    """Whether tensors are other than the stored ones: parts of them or scaled. `fastsafetensors`
    cannot read these.
    """

    @cached_property
    def locations(self) -> dict[str, tuple[WeightFile, TensorEntry]]:
        """File and entry of every tensor by its name, in reading order: file by file, by offset."""
        return {entry.name: (file, entry) for file in self.files for entry in file.entries}

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of all files together."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def is_mapped(self, name: str) -> bool:
        """Whether a memory map gives the tensor without a copy."""
        return self.locations[name][1].is_mappable

    def select(self, keep: Callable[[str], bool]) -> "WeightSource":
        """The tensors whose names `keep` accepts; files without any are left out."""
        chosen = (
            replace(file, entries=tuple(entry for entry in file.entries if keep(entry.name)))
            for file in self.files
        )
        return replace(self, files=tuple(file for file in chosen if file.entries))

    def __iter__(self) -> Iterator[tuple[WeightFile, TensorEntry]]:
        """Files and entries in reading order."""
        return iter(self.locations.values())


def weights_digest(source: WeightSource) -> str:
    """SHA-256, in hex, of names, dtypes and shapes of all tensors and of up to 4 KiB from the
    middle of each.

    It tells models of one architecture apart without reading them, and does not depend on folders
    or shards. A change outside the samples goes unnoticed; training and merging change every
    tensor.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        opened = {
            file.path: stack.enter_context(file.path.open("rb", buffering=0))
            for file in source.files
        }
        for name, (file, entry) in sorted(source.locations.items()):
            count = min(SAMPLE_BYTES, entry.size_bytes)
            opened[file.path].seek(entry.start + (entry.size_bytes - count) // 2)
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            digest.update(opened[file.path].read(count))
    return digest.hexdigest()


def open_weights(path: Path) -> WeightSource:
    """Open the weights in `path`: a safetensors file, an index, or a component's folder
    (`transformer/`, `vae/` ...).

    Only headers are read. If a folder holds plain files and variants (`.fp16.`), the plain ones are
    taken.

    Raises:
        MissingWeights: nothing is there, or a shard that the index names is absent.
        PickledWeights: only pickled files are there.
        CorruptFile, TruncatedFile, HeaderTooLarge: a file is damaged, or an index points outside
            its folder.
    """
    found = find_weights(path) if path.is_dir() else path
    return WeightSource(
        path, _read_shards(found) if found.suffix == ".json" else (read_header(found),)
    )


def is_model_path(path: Path) -> bool:
    """Whether `path` is a whole model's, a folder or an index of shards; a single file is an
    adapter's.
    """
    return path.is_dir() or path.suffix == ".json"


def find_weights(folder: Path) -> Path:
    """The index or the single file that holds a folder's weights. Raises MissingWeights or
    PickledWeights.
    """
    for stem in STEMS:
        for suffix in (".safetensors.index.json", ".safetensors"):
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    variants = sorted(folder.glob("*.safetensors.index.*json")) or sorted(
        folder.glob("*.safetensors")
    )
    if len(variants) == 1:
        return variants[0]
    pickles = (
        [] if variants else sorted(path for pattern in PICKLES for path in folder.glob(pattern))
    )
    for path in pickles:
        refuse_pickle(path)
    found = ", ".join(variant.name for variant in variants) or "nothing"
    message = f"{folder} holds no weights under a known name (found {found})"
    hint = f"name one file, or expect {STEMS[0]}.safetensors or {STEMS[1]}.safetensors there"
    raise MissingWeights(message, hint=hint)


def _read_shards(index: Path) -> tuple[WeightFile, ...]:
    weight_map = read_index(index)
    files = []
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            message = f"{index} names {shard}, which does not exist"
            raise MissingWeights(message, hint=f"fetch {shard} into {path.parent}")
        file = read_header(path)
        names = {name for name, location in weight_map.items() if location == shard}
        absent = sorted(names - set(file.by_name))
        if absent:
            message = (
                f"{index} looks for {absent[0]!r} in {shard}, which does not hold it "
                f"({len(absent)} such)"
            )
            raise CorruptFile(
                message,
                hint="index and shards are of different saves: fetch or save all of them again",
            )
        files.append(
            replace(file, entries=tuple(entry for entry in file.entries if entry.name in names))
        )
    return tuple(files)


def read_index(index: Path) -> dict[str, str]:
    """Read an index: tensor name to the name of a shard in the same folder.

    Raises CorruptFile for anything else, as the index may be untrusted.
    """
    hint = "fetch the index again, or save the model again"
    try:
        weight_map: dict[str, str] = json.loads(read_bounded(index, MAX_HEADER_BYTES))["weight_map"]
        if not (
            isinstance(weight_map, dict)
            and all(isinstance(shard, str) for shard in weight_map.values())
        ):
            raise TypeError("weight_map is not a table of file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFile(
            f"{index} is not an index of shards ({type(error).__name__}: {error})", hint=hint
        ) from error
    for shard in set(weight_map.values()):
        # The name alone decides: the hub's cache keeps symbolic links, so what a path resolves to
        # says nothing.
        if not shard.endswith(".safetensors") or any(
            mark in shard for mark in ("/", "\\", ":", "\0")
        ):
            raise CorruptFile(
                f"{index} points at {shard!r}, which is not a safetensors file in its folder",
                hint=hint,
            )
    return weight_map
