"""Save safetensors so that a reader finds the old file or the new one whole, never a half; large models in shards."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.runtime import atomic_write, write_text_atomic

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 10 * 10**9
"""diffusers' own default for a shard."""

METADATA = {"format": "pt"}
"""What diffusers and transformers demand to find in a file's metadata."""


def save_file(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None) -> None:
    """Save tensors of any layout and device into one file, atomically. Tied tensors are stored under each name.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file as write

    with atomic_write(path) as part:
        mode = part.stat().st_mode
        try:
            write(_storable(tensors), part, metadata={**METADATA, **(metadata or {})})
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        part.chmod(mode)  # safetensors leaves a file that only its owner can read


def _storable(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Contiguous, and none sharing its memory with another: the format has no notion of either."""
    seen: set[int] = set()
    storable = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        pointer = whole.untyped_storage().data_ptr()
        storable[name] = whole.clone() if pointer in seen else whole
        seen.add(pointer)
    return storable


def save_shards(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[list[str]], Mapping[str, "Tensor"]],
    *,
    stem: str,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Save a model in the layout that diffusers loads: one file, or shards and an index, written last.

    `read` gives tensors by name, those of one shard at a time, and no more is held; their `sizes` are in bytes.
    A save that is interrupted leaves a folder without an index or single file, which is refused, not half loaded.
    A tensor larger than `max_shard_bytes` gets a shard of its own. Returns the files written.
    """
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    shards = _into_shards(sizes, max_shard_bytes)
    stale = set(folder.glob(f"{stem}-?????-of-?????.safetensors"))
    if len(shards) == 1:
        save_file(single, read(shards[0]), metadata)
        index.unlink(missing_ok=True)
        _remove(stale)
        return (single,)
    index.unlink(missing_ok=True)
    single.unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    written = []
    for number, names in enumerate(shards, start=1):
        path = folder / f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        save_file(path, read(names), metadata)
        weight_map |= dict.fromkeys(names, path.name)
        written.append(path)
    _write_index(index, weight_map, sum(sizes.values()))
    _remove(stale - set(written))
    return (*written, index)


def _into_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_text_atomic(path, json.dumps(document, indent=2, sort_keys=True) + "\n")


def _remove(paths: set[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
