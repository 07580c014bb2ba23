"""The ways of reading tensors from safetensors files, behind one interface. Which is fastest is measured, not known.

    safetensors      maps the file; instant on the CPU, and pages that are never touched are never read
    pread            reads each tensor into a buffer of its own, a few ahead: the least host memory
    fastsafetensors  reads chunks in parallel straight to the device: GPUDirect Storage where the driver has it,
                     the unified copier on integrated memory, else bounce buffers

Adding one is a class and a line in LOADERS; the contract tests pick it up.
"""

import mmap
import os
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from autotune.errors import InvalidInput
from autotune.weights.errors import TruncatedFile
from autotune.weights.files import DOWNLOAD_AGAIN, TensorEntry, WeightFile, read_file
from autotune.weights.sources import WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor

READ_AHEAD_BYTES = 16 << 20
"""What `pread` may hold beyond the tensor in use, unless one tensor alone is larger."""

READ_THREADS = 4
PIECE_BYTES = 4 << 20
OWN_PAGES_BYTES = 1 << 20
CHUNK_BYTES = 256 << 20
"""What `fastsafetensors` holds at a time, unless one tensor alone is larger."""

Named = tuple[str, "Tensor"]


class Loader(Protocol):
    """One way of reading."""

    name: ClassVar[str]

    def unavailable(self, device: "torch.device") -> str | None:
        """Why it cannot read to `device` on this machine, or None."""

    def held_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        """Most that it holds beside the tensors it has given, for files of `stored_bytes`.

        `shares_memory`: whether the file's cached pages count against the device, as on integrated GPUs.
        """

    def stream(self, source: WeightSource, device: "torch.device") -> Generator[Named, None, None]:
        """Every tensor of `source` once, by name, on `device`, as stored: same dtype, shape and bits.

        A tensor is the caller's to keep. Files and buffers are released when the generator ends or is closed.
        """


class MappedLoader:
    """Hugging Face's own reader over a memory map."""

    name: ClassVar[str] = "safetensors"

    def unavailable(self, device: "torch.device") -> str | None:
        return None

    def held_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        return stored_bytes if shares_memory else 0  # elsewhere the system drops mapped pages when it needs memory

    def stream(self, source: WeightSource, device: "torch.device") -> Generator[Named, None, None]:
        from safetensors import safe_open

        for file in source.files:
            with safe_open(file.path, framework="pt", device=str(device)) as opened:
                for entry in file.entries:
                    yield entry.name, opened.get_tensor(entry.name)


class PreadLoader:
    """Positional reads into one fresh buffer per tensor, by a few threads that run a bounded way ahead."""

    name: ClassVar[str] = "pread"

    def unavailable(self, device: "torch.device") -> str | None:
        return None if hasattr(os, "preadv") else "this system has no preadv"

    def held_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        return READ_AHEAD_BYTES

    def stream(self, source: WeightSource, device: "torch.device") -> Generator[Named, None, None]:
        with ExitStack() as stack:
            descriptors = {file.path: _descriptor(file.path, stack) for file in source.files}
            # Entered after the files, so left before them: no thread reads a closed file.
            pool = stack.enter_context(ThreadPoolExecutor(READ_THREADS, thread_name_prefix="pread"))
            stack.callback(pool.shutdown, cancel_futures=True)
            yield from _read_ahead(pool, source, descriptors, device)


def _read_ahead(
    pool: ThreadPoolExecutor, source: WeightSource, descriptors: Mapping[Path, int], device: "torch.device"
) -> Generator[Named, None, None]:
    pending: deque[tuple[TensorEntry, Tensor, list[Future[None]]]] = deque()
    pending_bytes = 0

    def take() -> Named:  # a function, so that no name here keeps a tensor alive while the next is read
        entry, tensor, pieces = pending.popleft()
        for piece in pieces:
            piece.result()
        return entry.name, tensor.to(device)

    for file, entry in source:
        while pending and pending_bytes + entry.size_bytes > READ_AHEAD_BYTES:
            pending_bytes -= pending[0][0].size_bytes
            yield take()
        pending.append((entry, *_start_reading(pool, descriptors[file.path], entry, file)))
        pending_bytes += entry.size_bytes
    while pending:
        yield take()


def _start_reading(
    pool: ThreadPoolExecutor, descriptor: int, entry: TensorEntry, file: WeightFile
) -> "tuple[Tensor, list[Future[None]]]":
    """A tensor that fills while one waits: threads share a large one, so that none is read by one thread alone."""
    tensor, view = _buffer(entry)
    pieces = [
        pool.submit(_fill, descriptor, view[start : start + PIECE_BYTES], entry.start + start, f"{file.path}")
        for start in range(0, entry.size_bytes, PIECE_BYTES)
    ]
    return tensor, pieces


def read_tensor(file: WeightFile, entry: TensorEntry) -> "Tensor":
    """One tensor, alone, on the CPU. Raises TruncatedFile where the file has shrunk since its header was read."""
    tensor, view = _buffer(entry)
    with ExitStack() as stack:
        _fill(_descriptor(file.path, stack), view, entry.start, f"{file.path}")
    return tensor


def _descriptor(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _buffer(entry: TensorEntry) -> "tuple[Tensor, memoryview]":
    """An uninitialized tensor, and its bytes. Pages of its own, where it is large: they go when the tensor does, while
    a heap keeps what was freed below a small allocation."""
    import torch

    if entry.size_bytes < OWN_PAGES_BYTES:
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        return tensor, memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    pages = mmap.mmap(-1, entry.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(entry.torch_dtype).view(entry.shape), memoryview(pages)


def _fill(descriptor: int, view: memoryview, start: int, file: str) -> None:
    done = 0
    while done < len(view):  # one call moves at most 2 GiB on Linux
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise TruncatedFile(f"{file} ended while its tensors were read", hint=DOWNLOAD_AGAIN)
        done += count


class FastLoader:
    """IBM's fastsafetensors, in chunks, so that the device holds one chunk beyond what the caller keeps."""

    name: ClassVar[str] = "fastsafetensors"

    def unavailable(self, device: "torch.device") -> str | None:
        if device.type not in {"cpu", "cuda"}:
            return f"fastsafetensors reads to cpu and cuda, not to {device.type}"
        try:
            from fastsafetensors import ParallelLoader  # noqa: F401
        except (ImportError, OSError) as error:
            return f"fastsafetensors does not import: {error}"
        return None if _finds_torchs_cuda() else "fastsafetensors finds no CUDA runtime: not torch's, nor a toolkit's"

    def held_bytes(self, stored_bytes: int, *, shares_memory: bool) -> int:
        return CHUNK_BYTES

    def stream(self, source: WeightSource, device: "torch.device") -> Generator[Named, None, None]:
        from fastsafetensors import ParallelLoader

        suited = tuple(file for file in source.files if _suits_fast(file))
        rest = tuple(file for file in source.files if not _suits_fast(file))
        yield from PreadLoader().stream(WeightSource(source.path, rest), device)
        if not suited:
            return
        loader = ParallelLoader(
            pg=None,
            hf_weights_files=[str(file.path) for file in suited],
            queue_size=-1,  # one chunk at a time
            use_tqdm_on_load=False,
            device=_with_index(device),
            nogds=not has_gds(),
            tensor_filter=frozenset(source.places).__contains__,
            all_local=True,
            max_batch_bytes=max(CHUNK_BYTES, *(entry.size_bytes for file in suited for entry in file.entries)),
        )
        with closing(loader), closing(loader.iterate_weights()) as weights:
            yield from weights


def _finds_torchs_cuda() -> bool:
    """Whether fastsafetensors reaches the GPU that torch sees, if any; it looks for one even to read to the processor.

    By itself it asks for `libcudart.so`, which only a toolkit has: so it is first shown what torch has loaded.
    """
    import torch
    from fastsafetensors import cpp

    if torch.version.cuda is None or not torch.cuda.is_available():
        return True
    for library in (f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "libcudart.so"):
        if not cpp.is_cuda_found():
            cpp.load_library_functions(library)
    return bool(cpp.is_cuda_found())


def _suits_fast(file: WeightFile) -> bool:
    """fastsafetensors 0.5 knows no complex numbers and cannot take a file without a byte."""
    return any(entry.size_bytes for entry in file.entries) and all(entry.dtype != "C64" for entry in file.entries)


def has_gds() -> bool:
    """Whether the driver of GPUDirect Storage is there. Without it fastsafetensors must be told not to ask for it."""
    return Path("/dev/nvidia-fs0").exists()


def _with_index(device: "torch.device") -> str:
    import torch

    if device.type != "cuda" or device.index is not None:
        return str(device)
    return f"cuda:{torch.cuda.current_device()}"


LOADERS: Mapping[str, Loader] = {loader.name: loader for loader in (MappedLoader(), PreadLoader(), FastLoader())}


def loader_called(name: str, device: "torch.device") -> Loader:
    """The loader of that name. Raises InvalidInput where it is unknown or cannot read to `device` here."""
    if name not in LOADERS:
        raise InvalidInput(f"no loader is called {name!r}", hint=f"choose one of {', '.join(LOADERS)}")
    reason = LOADERS[name].unavailable(device)
    if reason:
        raise InvalidInput(f"the loader {name} cannot be used here: {reason}", hint="choose the loader safetensors")
    return LOADERS[name]


def read_whole(path: Path) -> tuple[dict[str, "Tensor"], Mapping[str, str]]:
    """All tensors of a small file, on the CPU, and its metadata: a cache, an adapter, a checkpoint.

    Raises what `files.read_file` raises for a file that is absent, pickled or damaged.
    """
    import torch

    file = read_file(path)
    return dict(PreadLoader().stream(WeightSource(path, (file,)), torch.device("cpu"))), file.metadata
