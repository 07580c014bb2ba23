"""Headers of safetensors files: names, dtypes, shapes and byte ranges of tensors, without reading a
tensor.

The library validates a header (syntax, shapes, offsets without holes or overlaps), since a header
may be untrusted; this module turns its refusals into typed errors. The format
(github.com/huggingface/safetensors, "Format"): 8 bytes little-endian N, N bytes of JSON, then the
tensors' bytes without holes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from autotune.errors import InvalidInput
from autotune.system.files import read_bounded
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")


class BadWeights(InvalidInput):
    """Weights that cannot be used."""


class TruncatedFile(BadWeights):
    """The file ends before its tensors do: an interrupted copy or download."""


class CorruptFile(BadWeights):
    """The header or the index is invalid."""


class HeaderTooLarge(BadWeights):
    """The header claims more bytes than the format allows."""


class MissingWeights(BadWeights):
    """No weights, or not all the files that belong to them."""


class PickledWeights(BadWeights):
    """Only pickled files exist; reading one can run any code, so autotune does not."""


class KeyMismatch(BadWeights):
    """Tensors that the model needs are absent, or it has no slot for some."""


class ShapeMismatch(BadWeights):
    """A tensor has another shape than its slot in the model."""


class DtypeMismatch(BadWeights):
    """An integer tensor for a floating-point slot of the model, or the reverse."""


class HubError(BadWeights):
    """A repository on the hub that cannot be fetched: absent, gated, or out of reach."""


MAX_HEADER_BYTES = 16 << 20
"""A header of 100,000 tensors has 10 MB. The library's own limit is 100 MB, which it parses into
up to 3 GB."""

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
        order."""
        return ((self.start, self.size_bytes),)

    @property
    def is_mappable(self) -> bool:
        """Whether its bytes lie in the file in one piece, as they are."""
        return True

    def finished(self, stored: torch.Tensor) -> torch.Tensor:
        """The tensor that the stored one stands for."""
        return stored

    @property
    def torch_dtype(self) -> torch.dtype:
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
    rebuild the file."""
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
    missing nor left over."""
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
    cannot read these."""

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

    def select(self, keep: Callable[[str], bool]) -> WeightSource:
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


def find_weights(folder: Path) -> Path:
    """The index or the single file that holds a folder's weights. Raises MissingWeights or
    PickledWeights."""
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


LIBRARIES = ("diffusers", "transformers")
"""Libraries that component classes may come from: a name in an untrusted folder must not import
anything else."""

PIPELINE_PACKAGE = re.compile(r"[a-z][a-z0-9_]*")
"""Name of one of diffusers' packages of pipelines, where some keep classes of their own."""

MAX_CONFIG_BYTES = 1 << 20
MAX_BLOCKS = 1000
"""Far above any model, as the length of a list too; building so many takes some seconds."""
MAX_INTEGER = 1 << 24
"""Above any size in a configuration: constructors fill tables of so many numbers."""
MAX_TOKENIZER_BYTES = 64 << 20
"""For each file of a tokenizer, which its library reads as a whole; the largest of a known model
has 33 MB."""
BUILT_IN_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations of attention and of experts in transformers itself. Any other name may be that
of a repository, whose native code transformers would fetch and load; so may `flash_attention_2`,
if the package is not installed."""

DOWNLOAD_AGAIN = "download the whole pipeline again, in the diffusers layout"


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted model folder.

    Raises InvalidInput if it cannot be read, is no JSON object, asks for more of anything than any
    model has, or names code that is not in the libraries.
    """
    hint = (
        "point --model at a folder in the diffusers layout: model_index.json, transformer/, "
        "vae/ "
        "and so on"
    )
    try:
        data = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a JSON object", hint=hint)
    for name, value in _walk(data):
        limit = MAX_BLOCKS if re.search("layers|blocks|depth|experts", name) else MAX_INTEGER
        if isinstance(value, int) and abs(value) > limit:
            raise InvalidInput(
                f"{path} asks for {str(value)[:20]} {name}, more than any model has", hint=hint
            )
        if isinstance(value, list) and len(value) > MAX_BLOCKS:
            raise InvalidInput(
                f"{path} lists {len(value)} {name}, more than any model has", hint=hint
            )
        if reason := _find_foreign_code(name, value):
            raise InvalidInput(
                f"{path} {reason}",
                hint=(
                    "delete that line, or use the published model: code from elsewhere is never run"
                ),
            )
    return data


def require_bounded(component: Path) -> None:
    """Look at files that have no weights, before a library reads them as a whole.

    Raises InvalidInput if a scheduler's configuration is damaged, or a file of a tokenizer or
    processor is too large.
    """
    config = component / "scheduler_config.json"
    if os.path.lexists(config):
        read_config(config)
    for path in (
        component.iterdir() if component.name.startswith(("tokenizer", "processor")) else ()
    ):
        if path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise InvalidInput(f"{path} is larger than any tokenizer's files", hint=DOWNLOAD_AGAIN)


def _walk(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value of a configuration, also in the dictionaries inside it and in its
    lists."""
    for name, value in data.items():
        yield name, value
        parts = [value] if isinstance(value, dict) else value if isinstance(value, list) else []
        for part in parts:
            yield from _walk(
                part
                if isinstance(part, dict)
                else {name: part}
                if isinstance(part, list | int)
                else {}
            )


def _find_foreign_code(name: str, value: Any) -> str | None:
    """What in an entry of a configuration would load code, or a configuration that was not looked
    at; None if nothing.

    Classes of an `auto_map` are never imported: `trust_remote_code` is False or not an argument in
    all that we call.
    """
    if name == "configuration_files" and value:
        return "replaces itself by other files"
    if "_implementation" in name:
        for choice in value.values() if isinstance(value, dict) else (value,):
            if choice not in BUILT_IN_IMPLEMENTATIONS:
                return f"asks for {name} {str(choice)[:80]!r}, which is not part of transformers"
    return None


def read_model_index(folder: Path) -> dict[str, Any]:
    """Read a pipeline's `model_index.json`: its class as `_class_name`, (library, class) of each
    component.

    Raises InvalidInput if it cannot be read, or a component comes from a library that is not in
    LIBRARIES, nor from one of diffusers' packages of pipelines, or is of a class that looks for its
    code in the folder.
    """
    index = read_config(folder / PIPELINE_INDEX)
    for name, entry in index.items():
        if not isinstance(entry, list) or (
            entry and all(isinstance(part, int | float) for part in entry)
        ):
            continue  # a setting of the pipeline, such as the layers of Krea 2's text encoder
        if entry[:1] == ["transformers"] and str(entry[-1]).startswith("Auto"):
            raise InvalidInput(
                f"{name} in {folder} is an {entry[-1]}, which takes its code from the files",
                hint=(
                    "write the class that it stands for into model_index.json, or use the "
                    "published pipeline"
                ),
            )
        if entry[:1] not in ([None], *([library] for library in LIBRARIES)) and not _has_pipelines(
            *entry[:1]
        ):
            raise InvalidInput(
                f"{name} in {folder} comes from {entry[0] if entry else 'nowhere'}, not from "
                "diffusers or transformers",
                hint="use the published pipeline: code from elsewhere is never run",
            )
    return index


def _has_pipelines(name: object = None) -> bool:
    """Whether diffusers has a package of pipelines of that name; it is not imported."""
    if not isinstance(name, str) or not PIPELINE_PACKAGE.fullmatch(name):
        return False
    found = importlib.util.find_spec("diffusers")
    places = (found and found.submodule_search_locations) or []
    return any((Path(place) / "pipelines" / name / "__init__.py").is_file() for place in places)


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """(module, class) of a component in `read_model_index`. Raises MissingWeights if the
    pipeline does not have it."""
    match read_model_index(folder).get(name):
        case [str(library), str(class_name)]:
            return library if library in LIBRARIES else f"diffusers.pipelines.{library}", class_name
    raise MissingWeights(
        f"{folder / PIPELINE_INDEX} does not say what {name} is", hint=DOWNLOAD_AGAIN
    )
