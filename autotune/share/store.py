"""Stores of records: folders of this machine (git checkouts, too) or whatever fsspec can reach,
with one file per record, `<architecture>/<sha256 of the content>.json`. Two stores merge by union.

A record is taken only if it is whole, unaltered, valid, in its folder and possible.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.base import Frozen
from autotune.share.record import MAX_RECORD_BYTES, DamagedRecord, Record, parse_record
from autotune.system.files import SCHEME, atomic_write, data_path, describe_url, quote_error

KEY = re.compile(r"[a-z0-9-]{1,60}/[0-9a-f]{64}\.json")
"""Path of a record inside a store; no other path is ever read or written."""


class Transfer(Frozen):
    """Result of a push or a pull."""

    num_new: int
    num_present: int
    refused: tuple[str, ...]
    """Why records were refused, one sentence each, with its name."""
    target: str  # where the records went


@dataclass(frozen=True)
class RecordFile:
    """A file of a store: the record in it, or why there is none."""

    key: str
    content: bytes
    record: Record | None
    problem: str = ""

    @property
    def name(self) -> str:
        return Path(self.key).stem


class Store:
    """Records in the folder at a path or a URL; `options` go to fsspec's file system."""

    def __init__(self, url: str, **options: Any) -> None:
        is_url = "://" in url
        self.url, self.address = url, describe_url(url) if is_url else url
        """The address is for messages, without passwords."""
        path = Path(url).expanduser() if url and not is_url else Path()
        is_odd = "@" in url or SCHEME.match(url)
        if not is_url and (not url or (is_odd and not path.exists())):
            raise InvalidInput(  # such a folder would be made here, and may hold a password
                "the store's address is neither a folder nor a URL",
                hint="write s3://bucket/path; of a git repository name the folder of your clone",
            )
        with self._translate_errors():  # fsspec names the package that a protocol needs
            self.fs, root = url_to_fs(url if is_url else str(path.absolute()), **options)
        self.root = str(root).rstrip("/")
        self.folder = Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def sizes(self, architecture: str = "") -> dict[str, int]:
        """List the bytes of every record by its key; opens no file and follows no link."""
        with self._translate_errors():
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(f"{self.root}/{architecture}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
        keys = {path[len(self.root) + 1 :]: info for path, info in sorted(found.items())}
        return {
            key: int(info["size"] or 0)
            for key, info in keys.items()
            if KEY.fullmatch(key) and info["type"] == "file" and not info.get("islink")
        }

    def read(self, keys: Sequence[str] | None = None) -> Iterator[RecordFile]:
        """Read the files at these keys, or all; those that were deleted meanwhile are left out."""
        keys = list(self.sizes() if keys is None else keys)
        paths, ends = [self._path(key) for key in keys], [MAX_RECORD_BYTES + 1] * len(keys)
        with self._translate_errors():
            contents = self.fs.cat_ranges(paths, [0] * len(keys), ends, on_error="return")
            for content in contents:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        for key, content in zip(keys, contents, strict=True):
            if isinstance(content, bytes):
                try:
                    yield RecordFile(key, content, parse_record(content, key))
                except DamagedRecord as error:
                    yield RecordFile(key, content, None, error.message)

    def write(self, key: str, content: bytes) -> None:
        """Write the file whole or not at all: as one PUT, or under another name first."""
        path = self._path(key)
        folder = path.rpartition("/")[0]
        with self._translate_errors():
            if self.folder is None:
                if self.fs.protocol not in ("s3", ("s3", "s3a")):  # there mkdir makes buckets
                    self.fs.makedirs(folder, exist_ok=True)
                self.fs.pipe_file(path, content)
                return
            if Path(folder).is_symlink():
                raise OSError(f"{Path(folder).name} is a link")
            with atomic_write(Path(path)) as part:
                part.write_bytes(content)

    def add(self, *records: Record) -> int:
        """Write records that were made here; returns how many were new."""
        sizes = self.sizes()
        absent = [one for one in records if sizes.get(one.key) != len(one.content)]
        for one in absent:
            self.write(one.key, one.content)
        return len(absent)

    def delete(self, key: str) -> None:
        with self._translate_errors():
            self.fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise InvalidInput(f"{key!r} is not the path of a record", hint="see `profiles list`")
        return f"{self.root}/{key}"

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Into one error that names the store and hides the secrets of its URL."""
        try:
            yield
        except AutotuneError:
            raise
        except Exception as error:
            secret = self.url if "://" in self.url else None
            raise AutotuneError(
                f"cannot reach {self.address}: {type(error).__name__}: "
                f"{quote_error(error, secret)}",
                hint="check address, network and access, and run it again: what is there is whole",
            ) from None  # the chain would show what was left out


def user_store() -> Store:
    """Open this user's records: what was planned on this machine and what was pulled."""
    return Store(str(data_path("profiles")))


def merge_stores(source: Store, target: Store) -> Transfer:
    """Copy, byte for byte, the sound records that only `source` has; nothing else is read."""
    there, sizes = target.sizes(), source.sizes()
    wanted = [key for key, size in sizes.items() if there.get(key) != size]  # or it is cut off
    num_new, refused = 0, []
    for file in source.read(wanted):
        if file.record is None:
            refused.append(file.problem)
        else:
            target.write(file.key, file.content)
            num_new += 1
    return Transfer(
        num_new=num_new,
        num_present=len(sizes) - len(wanted),
        refused=tuple(refused),
        target=target.address,
    )


def prune_store(
    store: Store, names: Sequence[str] = (), *, dry_run: bool = False
) -> tuple[str, ...]:
    """Delete the named records, or else those that are bad or superseded.

    Names may be shortened; one line for each record says why. Raises InvalidInput, with nothing
    deleted, if a name fits no record or several.
    """
    useless = {}
    for name in names:
        keys = [key for key in store.sizes() if Path(key).stem.startswith(name.lower())]
        if len(name) < 4 or len(keys) != 1:
            raise InvalidInput(
                f"{len(keys) or 'no'} records begin with {name!r} in {store.address}",
                hint="`autotune profiles list` shows their names; give at least 4 digits",
            )
        useless[keys[0]] = f"{Path(keys[0]).stem[:12]} was named"
    if not names:
        useless = dict(_find_useless(store))
    for key in () if dry_run else useless:
        store.delete(key)
    return tuple(useless.values())


def _find_useless(store: Store) -> Iterator[tuple[str, str]]:
    sound = []
    for file in store.read():
        if file.record:
            sound.append((file.record, file))
        else:
            yield file.key, file.problem
    sound.sort(key=lambda pair: (pair[0].measured_on, len(pair[0].trials)), reverse=True)
    # A newer record of the same machine, versions and work supersedes one of no more trials.
    fullest: dict[tuple[object, ...], tuple[str, int]] = {}
    for record, file in sound:
        machine = record.machine
        versions = machine.versions.changed(python="", driver=None)
        size = machine.total_memory_bytes
        about = (machine.device_name, size, versions, record.workload, record.conclusive)
        newer, max_trials = fullest.get(about, ("", 0))
        if len(record.trials) <= max_trials:
            yield file.key, f"{file.name[:12]} is superseded by {newer}"
        else:
            fullest[about] = (file.name[:12], len(record.trials))
