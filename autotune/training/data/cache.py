"""A folder of encoded tensors: one safetensors file per entry, named by what it was made from.

Entries are written whole (temporary, fsync, rename) and carry a digest of their tensors, so what an interruption or a
bad disk leaves behind is never trusted. A file's modification time is when it was last used.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.atomic import replacing
from autotune.errors import AutotuneError, InvalidInput
from autotune.weights.errors import BadWeights, MissingWeights
from autotune.weights.loaders import read_whole

if TYPE_CHECKING:
    from torch import Tensor

SIZE_LIMIT_BYTES = 50 * 1024**3
FORMAT = "1"
"""Raise it when what an entry holds changes its meaning: older entries are then never found."""

STALE_SECONDS = 3600.0
"""Temporary files older than this belong to a writer that died."""

TOUCH_SECONDS = 60.0
"""How exactly the last use is known: touching a file at every read costs more than reading it."""

Tensors = dict[str, "Tensor"]


def entry_key(kind: str, **parts: object) -> str:
    """Name of the entry for what it is made from: `kind` and the SHA-256 of `parts` in canonical JSON."""
    text = json.dumps({"format": FORMAT, "kind": kind, **parts}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


class Cache:
    """Encoded tensors under one folder. Several processes may share it."""

    def __init__(self, folder: Path, *, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
        self.folder = folder
        self.size_limit_bytes = size_limit_bytes

    def read(self, key: str) -> Tensors | None:
        """The tensors of an entry, or None where it is missing; a damaged one is removed and counts as missing."""
        path = self._path(key)
        try:
            tensors, metadata = read_whole(path)
        except (MissingWeights, OSError):
            return None
        except BadWeights:
            tensors, metadata = {}, {}
        if not tensors or metadata.get("digest") != tensors_digest(tensors):
            path.unlink(missing_ok=True)
            return None
        self._touch(path)
        return tensors

    def write(self, key: str, tensors: Mapping[str, "Tensor"]) -> int:
        """Store an entry and return its bytes on disk.

        Raises:
            AutotuneError: the disk is full or cannot be written to; nothing half-written remains.
        """
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        data = save(plain, metadata={"digest": tensors_digest(plain)})
        path = self._path(key)
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            raise self._write_error(error) from error
        return len(data)

    def evict(self, keep: Collection[str]) -> int:
        """Remove the entries used least recently until the rest is within the limit; return how many went.

        Those in `keep` stay even where they alone exceed the limit: a run cannot do without its own.
        """
        kept_names = {self._path(key).name for key in keep}
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        total = sum(size for _, _, size in entries)
        removed = 0
        for path, _, size in entries:
            if total <= self.size_limit_bytes:
                break
            if path.name not in kept_names:
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
            try:
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue

    def require_space(self, needed_bytes: int) -> None:
        """Raise at once where the disk cannot take what is still to come.

        Raises:
            AutotuneError: less than `needed_bytes` is free.
        """
        free = shutil.disk_usage(self.folder).free
        if needed_bytes > free:
            raise AutotuneError(
                f"caching needs about {needed_bytes / 1e9:.1f} GB more in {self.folder}, where "
                f"{free / 1e9:.1f} GB is free",
                hint="free some space or choose another cache folder",
            )

    def _entries(self) -> list[tuple[Path, float, int]]:
        found = []
        for path in self.folder.glob("*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process evicts too
                continue
            found.append((path, stat.st_mtime, stat.st_size))
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _touch(self, path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                os.utime(path)
        except OSError:
            return  # a read-only cache still serves; it only forgets what was used

    def _write_error(self, error: OSError) -> AutotuneError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return AutotuneError(
                f"the disk of {self.folder} became full while caching; what is cached so far is kept",
                hint="free some space or choose another cache folder, then run the same command again",
            )
        return AutotuneError(
            f"cannot write to the cache folder {self.folder}: {error.strerror}", hint="choose another cache folder"
        )


def tensors_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in hex."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
