"""A folder of encoded tensors: one safetensors file per entry, named by what it was made from.

Entries are written atomically (temporary file, fsync, rename) and carry their key and a digest of
their tensors, so what an interruption or a bad disk leaves behind, or a copy under another name, is
never trusted. A file's modification time is the time of its last use.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from autotune.errors import AutotuneError, InvalidInput
from autotune.system.resources import require_free_disk, reraise_disk_full
from autotune.weights.files import BadWeights, MissingWeights
from autotune.weights.tensors import load_file, save_file

SIZE_LIMIT_BYTES = 50 * 1024**3
FORMAT = "1"
"""Version of what an entry holds; with a new one, older entries are never found."""

STALE_SECONDS = 3600.0
"""Age above which a temporary file belongs to a writer that died."""

TOUCH_SECONDS = 60.0
"""Resolution of the time of last use: updating it at every read would take longer than reading."""

CHOOSE_FOLDER = "choose another cache folder with XDG_CACHE_HOME"
MAKE_ROOM = f"free some space, or {CHOOSE_FOLDER}"

Tensors = dict[str, Tensor]


def entry_key(kind: str, **parts: object) -> str:
    """Name of an entry: `kind` and the SHA-256 of `parts`, what it is made from, in JSON. Runs
    resume by it."""
    text = json.dumps({"format": FORMAT, "kind": kind, **parts}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


class Cache:
    """Encoded tensors under one folder. Several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Tensors | None:
        """The tensors of an entry, or None if it is missing; a damaged one is removed and counts
        as missing."""
        path = self._path(key)
        try:
            tensors, metadata = load_file(path)
        except (MissingWeights, OSError):
            return None
        except BadWeights:
            tensors, metadata = {}, {}
        if (
            not tensors
            or metadata.get("key") != key
            or metadata.get("digest") != tensors_digest(tensors)
        ):
            path.unlink(missing_ok=True)
            return None
        self._touch(path)
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> int:
        """Store an entry and return its size on disk in bytes.

        Raises:
            AutotuneError: the disk is full or cannot be written to; no partial file remains.
        """
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = self._path(key)
        try:
            with reraise_disk_full(
                self.folder, hint=f"{MAKE_ROOM}, then run again: what is cached so far is kept"
            ):
                save_file(path, plain, {"key": key, "digest": tensors_digest(plain)})
        except OSError as error:
            raise AutotuneError(
                f"cannot write to the cache folder {self.folder}: {error.strerror}",
                hint=CHOOSE_FOLDER,
            ) from error
        return path.stat().st_size

    def evict(self, keep: Collection[str]) -> int:
        """Remove the least recently used entries until the others are within the limit; return how
        many were removed.

        Those in `keep` stay even if they alone exceed the limit: a run cannot do without its own.
        """
        protected = {self._path(key) for key in keep}
        entries = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        total, removed = sum(size for _, size, _ in entries), 0
        for _, size, path in sorted(entries):
            if total <= SIZE_LIMIT_BYTES:
                break
            if path not in protected:
                path.unlink(missing_ok=True)
                total -= size
                removed += 1
        return removed

    def refuse_pickles(self) -> None:
        """Raise InvalidInput if caches of another program lie here: reading a pickle can run any
        code."""
        found = next(iter(sorted(self.folder.glob("*.pt"))), None)
        if found is not None:
            raise InvalidInput(
                f"{found} is a pickled cache, which autotune does not read: it could run any code",
                hint=(
                    "delete the .pt files there and run again: captions and images are encoded "
                    "anew, as safetensors"
                ),
            )

    def remove_stale(self) -> None:
        """Remove temporary files of writers that died."""
        for path in self.folder.glob(".*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def require_space(self, needed_bytes: int) -> None:
        """Raise AutotuneError if the disk has less than `needed_bytes` free."""
        require_free_disk(self.folder, needed_bytes, "what is still to be cached", hint=MAKE_ROOM)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _touch(self, path: Path) -> None:
        with contextlib.suppress(
            OSError
        ):  # a read-only cache still works, without times of last use
            if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                os.utime(path)


class MemoryCache(Cache):
    """Encoded tensors in this process's memory: nothing is written, and they are gone when it
    ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._entries: dict[str, Tensors] = {}

    def read(self, key: str) -> Tensors | None:
        return self._entries.get(key)

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> int:
        self._entries[key] = {
            name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
        }
        return 0

    def evict(self, keep: Collection[str]) -> int:
        return 0

    def remove_stale(self) -> None:
        pass

    def require_space(self, needed_bytes: int) -> None:
        pass


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in hex."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
