"""Save safetensors so that a reader finds the old file or the new one whole, never a half; large
models in shards."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from torch import Tensor

from autotune.system.files import atomic_write, write_text_atomic

MAX_SHARD_BYTES = 10 * 10**9
"""diffusers' own default for a shard."""

METADATA = {"format": "pt"}
"""Metadata that diffusers and transformers require in a file."""


def save_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors of any layout and device into one file, atomically. Tied tensors are stored
    under each name.

    Equal tensors and metadata give equal bytes.

    Raises OSError if it cannot be written.
    """
    with atomic_write(path) as part:
        mode = part.stat().st_mode
        try:
            safetensors.torch.save_file(
                _separate(tensors), part, metadata={**METADATA, **(metadata or {})}
            )
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        _sort_metadata(part)
        part.chmod(mode)  # safetensors leaves a file that only its owner can read


def _sort_metadata(path: Path) -> None:
    """Sort the header's metadata, which the library writes in an order of its own each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # the same characters in another order, before padding
            file.seek(8)
            file.write(text.ljust(size))


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, none sharing its memory with another: the format can express neither."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        contiguous = tensor.detach().contiguous()
        pointer = contiguous.untyped_storage().data_ptr()
        separate[name] = contiguous.clone() if pointer in seen else contiguous
        seen.add(pointer)
    return separate


def save_shards(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[list[str]], Mapping[str, Tensor]],
    *,
    stem: str,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Save a model in the layout that diffusers loads: one file, or shards and an index, written
    last.

    `sizes` are the bytes of each tensor by name; `read` returns the tensors of one shard, and no
    more is held at a time. An interrupted save leaves a folder without an index or single file,
    which is refused, not half loaded. A tensor larger than `max_shard_bytes` gets a shard of its
    own. Returns the files written.
    """
    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=int,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    shards = {folder / name: names for name, names in split.filename_to_tensors.items()} or {
        single: []
    }
    if split.is_sharded:
        index.unlink(missing_ok=True)
        single.unlink(missing_ok=True)
    for path, names in shards.items():
        save_file(path, read(names), metadata)
    if split.is_sharded:
        document = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text_atomic(index, json.dumps(document, indent=2, sort_keys=True) + "\n")
    else:
        index.unlink(missing_ok=True)
    for stale in set(folder.glob(f"{stem}-?????-of-?????.safetensors")) - shards.keys():
        stale.unlink()
    return (*shards, index) if split.is_sharded else (single,)
