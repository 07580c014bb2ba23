"""A folder of encoded tensors: one safetensors file per entry, named by what it was made from.

Entries are written whole (temporary, fsync, rename) and carry their key and a digest of their tensors, so what an
interruption or a bad disk leaves behind, or a copy under another name, is never trusted. A file's modification time is
when it was last used.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError, InvalidInput
from autotune.runtime import require_free_disk, reraise_disk_full
from autotune.weights import BadWeights, MissingWeights, load_file, save_file

if TYPE_CHECKING:
    from torch import Tensor

SIZE_LIMIT_BYTES = 50 * 1024**3
FORMAT = "1"
"""Raise it when what an entry holds changes its meaning: older entries are then never found."""

STALE_SECONDS = 3600.0
"""Temporary files older than this belong to a writer that died."""

TOUCH_SECONDS = 60.0
"""How exactly the last use is known: touching a file at every read costs more than reading it."""

ANOTHER_FOLDER = "choose another cache folder with XDG_CACHE_HOME"
MAKE_ROOM = f"free some space, or {ANOTHER_FOLDER}"

Tensors = dict[str, "Tensor"]


def entry_key(kind: str, **parts: object) -> str:
    """Name of the entry for what it is made from: `kind` and the SHA-256 of `parts` in JSON. Runs resume by it."""
    text = json.dumps({"format": FORMAT, "kind": kind, **parts}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


class Cache:
    """Encoded tensors under one folder. Several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Tensors | None:
        """The tensors of an entry, or None where it is missing; a damaged one is removed and counts as missing."""
        path = self._path(key)
        try:
            tensors, metadata = load_file(path)
        except (MissingWeights, OSError):
            return None
        except BadWeights:
            tensors, metadata = {}, {}
        if not tensors or metadata.get("key") != key or metadata.get("digest") != tensors_digest(tensors):
            path.unlink(missing_ok=True)
            return None
        self._touch(path)
        return tensors

    def write(self, key: str, tensors: Mapping[str, "Tensor"]) -> int:
        """Store an entry and return its bytes on disk.

        Raises:
            AutotuneError: the disk is full or cannot be written to; nothing half-written remains.
        """
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = self._path(key)
        try:
            with reraise_disk_full(self.folder, hint=f"{MAKE_ROOM}, then run again: what is cached so far is kept"):
                save_file(path, plain, {"key": key, "digest": tensors_digest(plain)})
        except OSError as error:
            raise AutotuneError(
                f"cannot write to the cache folder {self.folder}: {error.strerror}", hint=ANOTHER_FOLDER
            ) from error
        return path.stat().st_size

    def evict(self, keep: Collection[str]) -> int:
        """Remove the entries used least recently until the rest is within the limit; return how many went.

        Those in `keep` stay even where they alone exceed the limit: a run cannot do without its own.
        """
        kept = {self._path(key) for key in keep}
        entries = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        total, removed = sum(size for _, size, _ in entries), 0
        for _, size, path in sorted(entries):
            if total <= SIZE_LIMIT_BYTES:
                break
            if path not in kept:
                path.unlink(missing_ok=True)
                total -= size
                removed += 1
        return removed

    def refuse_pickles(self) -> None:
        """Raise InvalidInput where caches of another program lie here: reading a pickle can run any code."""
        found = next(iter(sorted(self.folder.glob("*.pt"))), None)
        if found is not None:
            raise InvalidInput(
                f"{found} is a pickled cache, which autotune does not read: it could run any code",
                hint="delete the .pt files there and run again: captions and images are encoded anew, as safetensors",
            )

    def remove_stale(self) -> None:
        """Remove temporary files of writers that died."""
        for path in self.folder.glob(".*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def require_space(self, needed_bytes: int) -> None:
        """Raise AutotuneError where the disk cannot take the `needed_bytes` that are still to come."""
        require_free_disk(self.folder, needed_bytes, "what is still to be cached", hint=MAKE_ROOM)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _touch(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # a read-only cache still serves; it only forgets what was used
            if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                os.utime(path)


def tensors_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in hex."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
