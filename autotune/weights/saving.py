"""Save safetensors so that a reader finds the old file or the new one whole, never a half."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from autotune.system.files import atomic_write

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
