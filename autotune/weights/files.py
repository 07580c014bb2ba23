"""Headers of safetensors files and configurations of folders, read before anything is trusted.

The library validates a header: 8 bytes little-endian N, N bytes of JSON, then the tensors' bytes
without holes or overlaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from autotune.errors import InvalidInput
from autotune.system.files import read_bounded
from autotune.system.lazy import torch


class BadWeights(InvalidInput):
    """Weights that cannot be used."""


class TruncatedFile(BadWeights):
    """The file ends before its tensors do: an interrupted copy or download."""


class CorruptFile(BadWeights):
    """The header or the index is invalid."""


class MissingWeights(BadWeights):
    """No weights, or not all the files that belong to them."""


class PickledWeights(BadWeights):
    """Only pickled files exist; reading one can run any code, so autotune does not."""


class ModelMismatch(BadWeights):
    """Names, shapes or kinds of dtype that are not those of the model."""


class HubError(BadWeights):
    """A repository on the hub that cannot be fetched: absent, gated, or out of reach."""


MAX_HEADER_BYTES = 16 << 20  # of 100,000 tensors 10 MB; the library parses 100 MB into 3 GB
MAX_DIMENSIONS = 64
SAMPLE_BYTES = 4096  # bytes of each tensor that tell one model's weights from another's

CHECK_FILE_SIZE = "fetch or copy the file again, and compare its size with the original's"
NOT_SAFETENSORS = (
    "is this a safetensors file? Only .safetensors is read; fetch it again if it should be one"
)

DTYPES: Mapping[str, tuple[str, int]] = {  # torch's name, and the bytes of one element
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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str  # the format's name, e.g. `BF16`
    shape: tuple[int, ...]
    start: int  # offset of its first byte from the beginning of the file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(offset from the beginning of the file, number of bytes) of each run of its bytes."""
        return ((self.start, self.size_bytes),)

    @property
    def is_mappable(self) -> bool:
        return True

    def finished(self, stored: torch.Tensor) -> torch.Tensor:
        return stored

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return dtype


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file whose header has been read and validated."""

    path: Path
    size_bytes: int
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        return {entry.name: entry for entry in self.entries}


def read_header(path: Path) -> WeightFile:
    """Read and validate the header of a file. Raises what `open_weights` raises."""
    refuse_pickle(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise MissingWeights(f"{path} {what}", hint="check the path; weights end in .safetensors")
    size = path.stat().st_size
    header_bytes = _check_header_size(path, size)
    try:
        with safe_open(path, framework="np") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            described = [(name, it.get_dtype(), tuple(it.get_shape())) for name, it in slices]
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _explain(error, path, size, header_bytes) from error
    entries, start = [], 8 + header_bytes
    for name, dtype, shape in described:
        if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 2**63:
            reason = f"{name!r} has a dtype or a shape that torch cannot hold: {dtype}, {shape[:5]}"
            raise _corrupt(path, reason)
        entries.append(TensorEntry(name, dtype, shape, start))
        start += entries[-1].size_bytes
    return WeightFile(path, size, tuple(entries), metadata)


def refuse_pickle(path: Path) -> None:
    """Raise PickledWeights if the suffix is that of a pickled format."""
    if path.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}:
        raise PickledWeights(
            f"{path} is a pickled file, which can run any code when it is read",
            hint="a cache: delete it and it is built again; a model: take it as .safetensors where "
            "it is published, or save it with save_pretrained(..., safe_serialization=True)",
        )


def _check_header_size(path: Path, file_bytes: int) -> int:
    with path.open("rb") as file:
        first = file.read(8)
    header_bytes = int.from_bytes(first, "little")
    if len(first) == 8 and header_bytes > MAX_HEADER_BYTES:
        reason = f"it claims a header of {header_bytes} bytes; {MAX_HEADER_BYTES} are allowed"
        raise _corrupt(path, reason)
    if 8 + header_bytes > file_bytes:
        what = f"{path} ends inside its header: it has {file_bytes} bytes"
        raise TruncatedFile(what, hint=CHECK_FILE_SIZE)
    return header_bytes


def _explain(
    error: SafetensorError, path: Path, file_bytes: int, header_bytes: int
) -> CorruptFile | TruncatedFile:
    if "not fully covered" not in str(error):
        return _corrupt(path, str(error))
    with path.open("rb") as file:
        header = json.loads(file.read(8 + header_bytes)[8:])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed_bytes = 8 + header_bytes + max(ends, default=0)
    if needed_bytes < file_bytes:
        left_over = file_bytes - needed_bytes
        return _corrupt(path, f"{left_over} bytes after the last tensor belong to none")
    message = f"{path} is cut off: its tensors need {needed_bytes} bytes, the file has {file_bytes}"
    return TruncatedFile(message, hint=CHECK_FILE_SIZE)


def _corrupt(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(f"{path} is damaged: {reason}", hint=NOT_SAFETENSORS)


STEMS = ("diffusion_pytorch_model", "model")  # diffusers' components, then transformers'
# The files that make a folder or a repository a pipeline: a classic one, or one of blocks.
PIPELINE_INDICES = ("model_index.json", "modular_model_index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class WeightSource:
    """All tensors of one component, in one file or several."""

    path: Path
    files: tuple[WeightFile, ...]
    is_view: bool = False  # of scaled tensors or parts, which `fastsafetensors` cannot read

    @cached_property
    def locations(self) -> dict[str, tuple[WeightFile, TensorEntry]]:
        return {entry.name: (file, entry) for file in self.files for entry in file.entries}

    @property
    def metadata(self) -> dict[str, str]:
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def select(self, keep: Callable[[str], bool]) -> WeightSource:
        chosen = (
            replace(file, entries=tuple(entry for entry in file.entries if keep(entry.name)))
            for file in self.files
        )
        return replace(self, files=tuple(file for file in chosen if file.entries))


def weights_digest(source: WeightSource) -> str:
    """Hash names, dtypes, shapes and up to 4 KiB from the middle of each tensor. It tells models of
    one architecture apart: training and merging change every tensor."""
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
    """Read the headers of a file, an index, or a component's folder, in which plain files win.
    Raises MissingWeights, PickledWeights, TruncatedFile or CorruptFile."""
    found = find_weights(path) if path.is_dir() else path
    files = _read_shards(found) if found.suffix == ".json" else (read_header(found),)
    return WeightSource(path, files)


def find_weights(folder: Path) -> Path:
    """Find a folder's index or single file of weights. Raises MissingWeights or PickledWeights."""
    for stem in STEMS:
        for suffix in (".safetensors.index.json", ".safetensors"):
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    indices = sorted(folder.glob("*.safetensors.index.*json"))
    variants = indices or sorted(folder.glob("*.safetensors"))
    if len(variants) == 1:
        return variants[0]
    if not variants:
        for path in sorted(path for pattern in PICKLES for path in folder.glob(pattern)):
            refuse_pickle(path)
    found = ", ".join(variant.name for variant in variants) or "nothing"
    hint = f"name one file, or expect {STEMS[0]}.safetensors or {STEMS[1]}.safetensors there"
    raise MissingWeights(f"{folder} holds no weights under a known name (found {found})", hint=hint)


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
        if absent := sorted(names - file.by_name.keys()):
            raise CorruptFile(
                f"{index} looks for {absent[0]!r} in {shard}, which does not hold it "
                f"({len(absent)} such)",
                hint="index and shards are of different saves: fetch or save all of them again",
            )
        entries = tuple(entry for entry in file.entries if entry.name in names)
        files.append(replace(file, entries=entries))
    return tuple(files)


def read_index(index: Path) -> dict[str, str]:
    """Read the shard of each tensor. Raises CorruptFile for anything that may be hostile."""
    hint = "fetch the index again, or save the model again"
    try:
        weight_map: dict[str, str] = json.loads(read_bounded(index, MAX_HEADER_BYTES))["weight_map"]
        shards = set(weight_map.values())
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("weight_map is not a table of file names")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{index} is not an index of shards ({reason})", hint=hint) from error
    for shard in shards:
        # The name alone decides: the hub's cache keeps symbolic links.
        if not shard.endswith(".safetensors") or re.search(r"[/\\:\0]", shard):
            message = f"{index} points at {shard!r}, which is not a safetensors file in its folder"
            raise CorruptFile(message, hint=hint)
    return weight_map


LIBRARIES = ("diffusers", "transformers")  # an untrusted name must not import anything else
PIPELINE_PACKAGE = re.compile(r"[a-z][a-z0-9_]*")  # of diffusers; some keep classes of their own

MAX_CONFIG_BYTES = 1 << 20
MAX_BLOCKS = 1000  # also of a list; building so many takes some seconds
MAX_INTEGER = 1 << 24  # constructors fill tables of so many numbers
MAX_TOKENIZER_BYTES = 64 << 20  # of a file, read as a whole; the largest known one has 33 MB
# Of attention and of experts in transformers itself. Any other name, and `flash_attention_2`
# without its package, may be a repository whose native code would be loaded.
BUILT_IN_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")

DOWNLOAD_AGAIN = "download the whole pipeline again, in the diffusers layout"


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted model folder, or raise InvalidInput."""
    hint = (
        "point --model at a folder in the diffusers layout: model_index.json, transformer/, "
        "vae/ and so on"
    )
    try:
        data = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot read {path}: {reason}", hint=hint) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a JSON object", hint=hint)
    for name, value in _walk(data):
        limit = MAX_BLOCKS if re.search("layers|blocks|depth|experts", name) else MAX_INTEGER
        asked = None
        if isinstance(value, int) and abs(value) > limit:
            asked = str(value)[:20]
        elif isinstance(value, list) and len(value) > MAX_BLOCKS:
            asked = f"a list of {len(value)}"
        if asked:
            message = f"{path} asks for {asked} {name}, more than any model has"
            raise InvalidInput(message, hint=hint)
        if reason := _find_foreign_code(name, value):
            raise InvalidInput(
                f"{path} {reason}",
                hint="delete that line, or use the published model: code from elsewhere is never "
                "run",
            )
    return data


def require_bounded(component: Path) -> None:
    """Raise InvalidInput for a damaged scheduler's configuration or too large tokenizers."""
    config = component / "scheduler_config.json"
    if os.path.lexists(config):
        read_config(config)
    is_text = re.search("tokenizer|processor", component.name) is not None
    for path in component.iterdir() if is_text else ():
        if path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise InvalidInput(f"{path} is larger than any tokenizer's files", hint=DOWNLOAD_AGAIN)


def _walk(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        yield name, value
        if isinstance(value, dict):
            yield from _walk(value)
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict):
                yield from _walk(part)
            elif isinstance(part, list | int):
                yield from _walk({name: part})


def _find_foreign_code(name: str, value: Any) -> str | None:
    # no `auto_map` loads code, as we do not set `trust_remote_code`
    if name == "configuration_files" and value:
        return "replaces itself by other files"
    if "_implementation" in name:
        for choice in value.values() if isinstance(value, dict) else (value,):
            if choice not in BUILT_IN_IMPLEMENTATIONS:
                return f"asks for {name} {str(choice)[:80]!r}, which is not part of transformers"
    return None


def read_model_index(folder: Path) -> dict[str, Any]:
    """Read a pipeline's class and those of its components, or raise InvalidInput."""
    index = read_config(find_index(folder))
    for name, entry in index.items():
        match entry:
            case [library, kind, {"type_hint": [hinted_library, hinted_kind]}]:  # of blocks
                index[name] = [library or hinted_library, kind or hinted_kind]
                if index[name][1] in ("AutoProcessor", "AutoTokenizer"):  # which families build
                    index[name] = [None, None]
    for name, entry in index.items():
        if not isinstance(entry, list) or (
            entry and all(isinstance(part, int | float) for part in entry)
        ):
            continue  # a setting of the pipeline, such as the layers of Krea 2's text encoder
        library = entry[0] if entry else "nowhere"
        if library == "transformers" and str(entry[-1]).startswith("Auto"):
            raise InvalidInput(
                f"{name} in {folder} is an {entry[-1]}, which takes its code from the files",
                hint="write the class that it stands for into model_index.json, or use the "
                "published pipeline",
            )
        if library not in (None, *LIBRARIES) and not _has_pipelines(library):
            what = f"{name} in {folder} comes from {library}, not from diffusers or transformers"
            hint = "use the published pipeline: code from elsewhere is never run"
            raise InvalidInput(what, hint=hint)
    return index


def _has_pipelines(name: object) -> bool:
    if not isinstance(name, str) or not PIPELINE_PACKAGE.fullmatch(name):
        return False
    found = importlib.util.find_spec("diffusers")
    places = (found and found.submodule_search_locations) or []
    return any((Path(place) / "pipelines" / name / "__init__.py").is_file() for place in places)


def find_index(folder: Path) -> Path:
    """Find the index of a pipeline's folder; the classic one's place if it has none."""
    paths = [folder / name for name in PIPELINE_INDICES]
    return next((path for path in paths if os.path.lexists(path)), paths[0])


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """Return (module, class) of a pipeline's component. Raises MissingWeights if it has none."""
    match read_model_index(folder).get(name):
        case [str(library), str(class_name)]:
            return library if library in LIBRARIES else f"diffusers.pipelines.{library}", class_name
    raise MissingWeights(f"{find_index(folder)} does not say what {name} is", hint=DOWNLOAD_AGAIN)
