"""Ways of reading tensors from safetensors files. Which is fastest is measured, not known.

safetensors      maps the file; instant on the CPU, and pages that are never touched are never read
pread            reads each tensor into a buffer of its own, in parallel: the least host memory
fastsafetensors  reads chunks in parallel straight to the device: GPUDirect Storage, the unified
                 copier on integrated memory, or bounce buffers
"""

from __future__ import annotations

import json
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open

from autotune.errors import InvalidInput
from autotune.events import OnEvent, Progressed, StatusChanged
from autotune.plan.base import Frozen, NaturalInt, log_event
from autotune.system.files import atomic_write
from autotune.system.lazy import Tensor, torch
from autotune.weights import files

READ_THREADS = 4
PIECE_BYTES = 4 << 20
OWN_PAGES_BYTES = 1 << 20
CHUNK_BYTES = 256 << 20  # held by `fastsafetensors` at a time, unless one tensor is larger
PIECE_ELEMENTS = 1 << 22  # checked at a time, so that widening fp8 for it takes little memory

NamedTensors = Generator[tuple[str, Tensor], None, None]


class Loader(ABC):
    """One way of reading."""

    name: ClassVar[str]

    def why_not(self, device: torch.device) -> str | None:
        """Tell why it cannot read to `device` on this machine; None if it can."""
        return None

    def overhead_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        """Bound what it holds besides yielded tensors; cached pages count if memory is shared."""
        return 0

    @abstractmethod
    def stream(self, source: files.WeightSource, device: torch.device) -> NamedTensors:
        """Yield every tensor by name, as stored; closing releases files and buffers."""


class MappedLoader(Loader):
    """Hugging Face's own reader over a memory map."""

    name = "safetensors"

    def overhead_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        # On a device of its own the system drops mapped pages when it needs memory.
        return stored_bytes if shares_memory else 0

    def stream(self, source: files.WeightSource, device: torch.device) -> NamedTensors:
        for file in source.files:
            if source.is_view:
                yield from _mapped_views(file, device)
                continue
            with safe_open(file.path, framework="pt", device=str(device)) as opened:
                for entry in file.entries:
                    yield entry.name, opened.get_tensor(entry.name)


def _mapped_views(file: files.WeightFile, device: torch.device) -> NamedTensors:
    with file.path.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # held by the tensors
        for entry in file.entries:
            if not (entry.is_mappable and entry.size_bytes):
                yield entry.name, _read(opened.fileno(), file, entry, device)
                continue
            ((offset, size),) = entry.extents
            if offset + size > len(pages):
                raise _shrunk(file)
            stored = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=offset)
            yield entry.name, stored.view(entry.torch_dtype).view(entry.shape).to(device)


def _shrunk(file: files.WeightFile) -> files.TruncatedFile:
    message = f"{file.path} ended while its tensors were read"
    return files.TruncatedFile(message, hint=files.CHECK_FILE_SIZE)


class PreadLoader(Loader):
    """Positional reads into one fresh buffer per tensor. The library's `backend="pread"` holds
    Python's lock while it reads, takes twice the memory of one tensor, and its buffers start at any
    multiple of 16 bytes, on which CPU kernels may round differently from run to run."""

    name = "pread"

    def why_not(self, device: torch.device) -> str | None:
        return None if hasattr(os, "preadv") else "this system has no preadv"

    def stream(self, source: files.WeightSource, device: torch.device) -> NamedTensors:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="pread") as pool:
            for file in source.files:
                with file.path.open("rb") as opened:
                    for entry in file.entries:
                        yield entry.name, _read(opened.fileno(), file, entry, device, pool)


def read_tensor(file: files.WeightFile, entry: files.TensorEntry) -> Tensor:
    """Read one tensor to the CPU. Raises TruncatedFile if the file has shrunk meanwhile."""
    with file.path.open("rb") as opened:
        return _read(opened.fileno(), file, entry, torch.device("cpu"))


def _read(
    descriptor: int,
    file: files.WeightFile,
    entry: files.TensorEntry,
    device: torch.device,
    pool: ThreadPoolExecutor | None = None,
) -> Tensor:
    tensor, buffer = _allocate(entry)

    def read_piece(piece: tuple[int, int, int]) -> None:
        offset, start, end = piece
        while start < end:
            count = os.preadv(descriptor, [buffer[start:end]], offset)
            if count == 0:
                raise _shrunk(file)
            start, offset = start + count, offset + count

    pieces, filled = [], 0
    for offset, size in entry.extents:
        for at in range(0, size, PIECE_BYTES):
            end = min(at + PIECE_BYTES, size)
            pieces.append((offset + at, filled + at, filled + end))
        filled += size
    list(pool.map(read_piece, pieces) if pool and len(pieces) > 1 else map(read_piece, pieces))
    return entry.finished(tensor.to(device))


def _allocate(entry: files.TensorEntry) -> tuple[Tensor, memoryview]:
    """An uninitialized tensor and its bytes; a large one has pages of its own, freed with it."""
    if entry.size_bytes < OWN_PAGES_BYTES:
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        return tensor, memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    pages = mmap.mmap(-1, entry.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8).view(entry.torch_dtype)
    return flat.view(entry.shape), memoryview(pages)


class FastLoader(Loader):
    """IBM's fastsafetensors, in chunks: the device holds one beyond what the caller keeps."""

    name = "fastsafetensors"

    def why_not(self, device: torch.device) -> str | None:
        if device.type not in {"cpu", "cuda"}:
            return f"fastsafetensors reads to cpu and cuda, not to {device.type}"
        try:
            has_runtime = _has_cuda_runtime()
        except (ImportError, OSError) as error:
            return f"fastsafetensors does not import: {error}"
        if has_runtime:
            return None
        return "fastsafetensors finds no CUDA runtime, neither torch's nor a toolkit's"

    def overhead_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        return CHUNK_BYTES

    def stream(self, source: files.WeightSource, device: torch.device) -> NamedTensors:
        from fastsafetensors import ParallelLoader

        supported = tuple(file for file in source.files if _is_supported(file))
        others = tuple(file for file in source.files if not _is_supported(file))
        yield from PreadLoader().stream(files.WeightSource(source.path, others), device)
        if not supported:
            return
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        sizes = [entry.size_bytes for file in supported for entry in file.entries]
        loader = ParallelLoader(
            pg=None,
            hf_weights_files=[str(file.path) for file in supported],
            queue_size=-1,  # one chunk at a time
            use_tqdm_on_load=False,
            device=str(device),
            nogds=not Path("/dev/nvidia-fs0").exists(),  # GPUDirect Storage's driver
            tensor_filter=frozenset(source.locations).__contains__,
            all_local=True,
            max_batch_bytes=max(CHUNK_BYTES, *sizes),
        )
        with closing(loader), closing(loader.iterate_weights()) as weights:
            yield from weights


def _has_cuda_runtime() -> bool:
    # It wants the GPU's runtime even for the CPU, as the toolkit's `libcudart.so`: it gets torch's.
    from fastsafetensors import ParallelLoader, cpp  # noqa: F401  # the loader must import, too

    if torch.version.cuda is None or not torch.cuda.is_available():
        return True
    for library in (f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "libcudart.so"):
        if not cpp.is_cuda_found():
            cpp.load_library_functions(library)
    return bool(cpp.is_cuda_found())


def _is_supported(file: files.WeightFile) -> bool:
    # fastsafetensors 0.5 knows no complex numbers, and no file without any bytes.
    has_bytes = any(entry.size_bytes for entry in file.entries)
    return has_bytes and all(entry.dtype != "C64" for entry in file.entries)


LOADERS: Mapping[str, Loader] = {
    loader.name: loader for loader in (MappedLoader(), PreadLoader(), FastLoader())
}


def get_loader(name: str, device: torch.device) -> Loader:
    """Return a loader by its name. Raises InvalidInput if it cannot read to `device`."""
    if name not in LOADERS:
        hint = f"choose one of {', '.join(LOADERS)}"
        raise InvalidInput(f"there is no loader called {name!r}", hint=hint)
    if reason := LOADERS[name].why_not(device):
        what = f"the loader {name} cannot be used on this machine: {reason}"
        raise InvalidInput(what, hint="choose the loader safetensors")
    return LOADERS[name]


def load_file(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Load all tensors of a small file to the CPU, and its metadata; errors as of `read_header`."""
    file = files.read_header(path)
    tensors = PreadLoader().stream(files.WeightSource(path, (file,)), torch.device("cpu"))
    return dict(tensors), file.metadata


def save_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors, tied ones too, atomically; equal content gives equal bytes. Raises OSError."""
    from safetensors.torch import save_file as write_safetensors

    with atomic_write(path) as part:
        mode = part.stat().st_mode
        try:
            # diffusers and transformers require the format.
            write_safetensors(_separate(tensors), part, {"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        _sort_metadata(part)
        part.chmod(mode)  # safetensors leaves a file that only its owner can read


def _sort_metadata(path: Path) -> None:
    # The library writes it in an order of its own each time.
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


class TensorSummary(Frozen):
    """One tensor of a file."""

    name: str
    dtype: str  # the format's name, e.g. `BF16`
    shape: tuple[int, ...]
    size_bytes: int = NaturalInt
    num_nan: int | None = None
    num_inf: int | None = None
    """Number of infinite values; None, as `num_nan`, if values were not read."""


class FileSummary(Frozen):
    """A safetensors file, or the shards of a model."""

    name: str
    size_bytes: int = NaturalInt
    metadata: dict[str, str]
    tensors: tuple[TensorSummary, ...]

    @property
    def num_nonfinite(self) -> int | None:
        """Number of NaN and infinite values of all tensors; None if values were not read."""
        if any(tensor.num_nan is None for tensor in self.tensors):
            return None
        return sum((tensor.num_nan or 0) + (tensor.num_inf or 0) for tensor in self.tensors)


def inspect_weights(
    path: str | Path, *, count_values: bool = True, on_event: OnEvent = log_event
) -> FileSummary:
    """Read keys, shapes, dtypes, metadata and size of a safetensors file, or of a model by its
    folder or index of shards; unless `count_values` is false, count NaN and infinite values, too.

    Raises:
        BadWeights: the file is not safetensors, or damaged.
    """
    path, name = Path(path), "counting NaN and infinite values"
    on_event(StatusChanged(text=name))
    source = files.open_weights(path)
    located, summaries = source.locations.values(), list[TensorSummary]()
    for file, entry in located:
        num_nan, num_inf = _count_nonfinite(file, entry) if count_values else (None, None)
        summary = TensorSummary(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            size_bytes=entry.size_bytes,
            num_nan=num_nan,
            num_inf=num_inf,
        )
        summaries.append(summary)
        on_event(Progressed(name=name, done=len(summaries), total=len(located)))
    return FileSummary(
        name=path.absolute().name,
        size_bytes=sum(file.size_bytes for file in source.files),
        metadata=source.metadata,
        tensors=tuple(summaries),
    )


def _count_nonfinite(file: files.WeightFile, entry: files.TensorEntry) -> tuple[int, int]:
    if not (entry.torch_dtype.is_floating_point or entry.torch_dtype.is_complex):
        return 0, 0
    num_nan = num_inf = 0
    for piece in read_tensor(file, entry).view(-1).split(PIECE_ELEMENTS):  # type: ignore[no-untyped-call]  # torch's own
        wide = piece.float() if piece.itemsize == 1 else piece  # torch has no isnan for fp8
        num_nan += int(torch.isnan(wide).sum())
        num_inf += int(torch.isinf(wide).sum())
    return num_nan, num_inf
