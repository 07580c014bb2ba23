"""Read what a safetensors file says of itself: names, dtypes, shapes, byte ranges. No tensor is touched.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian N, N bytes of JSON, then the tensors'
bytes without holes. Everything is checked before it is believed: a header comes from strangers.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.weights.errors import CorruptFile, HeaderTooLarge, MissingWeights, PickledWeights, TruncatedFile

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

MAX_DIMENSIONS = 64
"""torch's own limit. The product of a million large numbers would take minutes."""

DOWNLOAD_AGAIN = "fetch or copy the file again, and compare its size with the original's"
NOT_SAFETENSORS = "is this a safetensors file? Only .safetensors is read; fetch it again if it should be one"

DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""The format's dtype names: torch's name and the bytes of one element."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. Offsets are absolute, in bytes from the beginning of the file."""

    name: str
    dtype: str
    """The format's name, e.g. `BF16`."""
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.end - self.start

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype as torch calls it; imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return dtype


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file whose header has been read and found sound."""

    path: Path
    size_bytes: int
    entries: tuple[TensorEntry, ...]
    """In the order their bytes lie in the file."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """The entries, by name."""
        return {entry.name: entry for entry in self.entries}


def read_file(path: Path) -> WeightFile:
    """Read and check the header of one safetensors file.

    Raises:
        MissingWeights: there is no such file.
        PickledWeights: its suffix is one of torch's pickled formats.
        TruncatedFile, CorruptFile, HeaderTooLarge: the file is damaged.
    """
    refuse_pickle(path)
    if not path.is_file():
        raise MissingWeights(f"{path} does not exist", hint="check the path; weights end in .safetensors")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_length(file.read(8), size, path)
        raw = file.read(length)
    if len(raw) < length:
        raise TruncatedFile(f"{path} ended while its header was read", hint=DOWNLOAD_AGAIN)
    entries, metadata = parse_header(raw, size, path)
    return WeightFile(path, size, entries, metadata)


def refuse_pickle(path: Path) -> None:
    """Raise PickledWeights where the suffix says pickle; say how to rebuild."""
    if path.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}:
        raise PickledWeights(
            f"{path} is a pickled file, which can run any code when it is read",
            hint="a cache: delete it and it is built again; a model: "
            "save it with save_pretrained(..., safe_serialization=True)",
        )


def header_length(first: bytes, file_size: int, path: Path) -> int:
    """The header's length in bytes, from the file's first eight."""
    if len(first) < 8:
        raise TruncatedFile(f"{path} has {file_size} bytes: too short for a header", hint=DOWNLOAD_AGAIN)
    length: int = struct.unpack("<Q", first)[0]
    if length > MAX_HEADER_BYTES:
        message = f"{path} claims a header of {length} bytes; {MAX_HEADER_BYTES} are allowed"
        raise HeaderTooLarge(message, hint=NOT_SAFETENSORS)
    if 8 + length > file_size:
        message = f"{path} ends inside its header: {8 + length} bytes needed, {file_size} there"
        raise TruncatedFile(message, hint=DOWNLOAD_AGAIN)
    return length


def parse_header(raw: bytes, file_size: int, path: Path) -> tuple[tuple[TensorEntry, ...], dict[str, str]]:
    """Entries in the order of their bytes, and metadata, from a header of a file of `file_size` bytes. Pure."""
    document = _document(raw, path)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "its metadata is not a table of texts")
    base = 8 + len(raw)
    entries = [_entry(name, value, base, path) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = base
    for entry in entries:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            raise _corrupt(path, f"{entry.name!r} {what}")
        position = entry.end
    if position > file_size:
        message = f"{path} is cut off: its tensors need {position} bytes, {file_size} are there"
        raise TruncatedFile(message, hint=DOWNLOAD_AGAIN)
    if position < file_size:
        raise _corrupt(path, f"{file_size - position} bytes after the last tensor belong to none")
    return tuple(entries), metadata


def _document(raw: bytes, path: Path) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _corrupt(path, "its header is no JSON object")
    try:
        document = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid JSON ({type(error).__name__}: {error})") from error
    assert isinstance(document, dict)  # it starts with a brace
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(name: str, value: Any, base: int, path: Path) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(path, f"{name!r} lacks dtype, shape or offsets, or has more")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(path, f"{name!r} has the unknown dtype {dtype!r}")
    if not (_naturals(shape) and _naturals(offsets) and len(offsets) == 2 and len(shape) <= MAX_DIMENSIONS):
        raise _corrupt(path, f"{name!r} has a shape or offsets that cannot be")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype][1]:
        raise _corrupt(path, f"{name!r}: offsets {offsets} do not hold {dtype} of shape {shape}")
    return TensorEntry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _corrupt(path: Path, why: str) -> CorruptFile:
    return CorruptFile(f"{path} is damaged: {why}", hint=NOT_SAFETENSORS)
