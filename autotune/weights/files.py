"""Headers of safetensors files: names, dtypes, shapes and byte ranges of tensors, without reading a
tensor.

The library validates a header (syntax, shapes, offsets without holes or overlaps), since a header
may be untrusted; this module turns its refusals into typed errors. The format
(github.com/huggingface/safetensors, "Format"): 8 bytes little-endian N, N bytes of JSON, then the
tensors' bytes without holes.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from autotune.runtime import lazy_module
from autotune.weights.errors import (
    CorruptFile,
    HeaderTooLarge,
    MissingWeights,
    PickledWeights,
    TruncatedFile,
)

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

MAX_HEADER_BYTES = 16 << 20
"""A header of 100,000 tensors has 10 MB. The library's own limit is 100 MB, which it parses into
up to 3 GB.
"""

MAX_DIMENSIONS = 64
"""The limit of torch."""

CHECK_FILE_SIZE = "fetch or copy the file again, and compare its size with the original's"
NOT_SAFETENSORS = (
    "is this a safetensors file? Only .safetensors is read; fetch it again if it should be one"
)

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
"""torch's name and the bytes of one element, by the format's name of the dtype."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name, e.g. `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte from the beginning of the file."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(offset from the beginning of the file, number of bytes) of each run of its bytes, in
        order.
        """
        return ((self.start, self.size_bytes),)

    @property
    def is_mappable(self) -> bool:
        """Whether its bytes lie in the file in one piece, as they are."""
        return True

    def finished(self, stored: "torch.Tensor") -> "torch.Tensor":
        """The tensor that the stored one stands for."""
        return stored

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype in torch; imports torch."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return dtype


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file whose header has been read and validated."""

    path: Path
    size_bytes: int
    entries: tuple[TensorEntry, ...]
    """In the order of their bytes in the file."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """The entries by tensor name."""
        return {entry.name: entry for entry in self.entries}


def read_header(path: Path) -> WeightFile:
    """Read and validate the header of one safetensors file.

    Raises:
        MissingWeights: there is no such file.
        PickledWeights: its suffix is one of torch's pickled formats.
        TruncatedFile, CorruptFile, HeaderTooLarge: the file is damaged.
    """
    refuse_pickle(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise MissingWeights(f"{path} {what}", hint="check the path; weights end in .safetensors")
    size = path.stat().st_size
    header_bytes = _check_header_size(path, size)
    try:
        with safe_open(path, framework="np") as file:
            tensors = [(name, file.get_slice(name)) for name in file.offset_keys()]
            described = [
                (name, tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors
            ]
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _explain(error, path, size, header_bytes) from error
    entries, start = [], 8 + header_bytes
    for name, dtype, shape in described:
        if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 2**63:
            raise _corrupt(
                path,
                f"{name!r} has a dtype or a shape that torch cannot hold: {dtype}, {shape[:5]}",
            )
        entries.append(TensorEntry(name, dtype, shape, start))
        start += entries[-1].size_bytes
    return WeightFile(path, size, tuple(entries), metadata)


def refuse_pickle(path: Path) -> None:
    """Raise PickledWeights if the suffix is that of a pickled format; the hint says how to
    rebuild the file.
    """
    if path.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}:
        raise PickledWeights(
            f"{path} is a pickled file, which can run any code when it is read",
            hint="a cache: delete it and it is built again; a model: take it as .safetensors where "
            "it is published, or "
            "save it with save_pretrained(..., safe_serialization=True)",
        )


def _check_header_size(path: Path, file_bytes: int) -> int:
    """The header's length in bytes, from the first eight bytes of the file."""
    with path.open("rb") as file:
        first = file.read(8)
    if len(first) < 8:
        raise TruncatedFile(
            f"{path} has {file_bytes} bytes: too short for a header", hint=CHECK_FILE_SIZE
        )
    header_bytes: int = struct.unpack("<Q", first)[0]
    if header_bytes > MAX_HEADER_BYTES:
        message = f"{path} claims a header of {header_bytes} bytes; {MAX_HEADER_BYTES} are allowed"
        raise HeaderTooLarge(message, hint=NOT_SAFETENSORS)
    if 8 + header_bytes > file_bytes:
        message = (
            f"{path} ends inside its header, which needs {8 + header_bytes} bytes; the file "
            "has "
            f"{file_bytes}"
        )
        raise TruncatedFile(message, hint=CHECK_FILE_SIZE)
    return header_bytes


def _explain(
    error: SafetensorError, path: Path, file_bytes: int, header_bytes: int
) -> CorruptFile | TruncatedFile:
    """The typed error for a refusal of the library, which says neither how many bytes are
    missing nor left over.
    """
    if "not fully covered" not in str(error):
        return _corrupt(path, str(error))
    with path.open("rb") as file:
        header = json.loads(
            file.read(8 + header_bytes)[8:]
        )  # valid, or the library would have said something else
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed_bytes = 8 + header_bytes + max(ends, default=0)
    if needed_bytes < file_bytes:
        return _corrupt(
            path, f"{file_bytes - needed_bytes} bytes after the last tensor belong to none"
        )
    message = f"{path} is cut off: its tensors need {needed_bytes} bytes, the file has {file_bytes}"
    return TruncatedFile(message, hint=CHECK_FILE_SIZE)


def _corrupt(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(f"{path} is damaged: {reason}", hint=NOT_SAFETENSORS)
