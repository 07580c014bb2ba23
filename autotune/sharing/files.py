"""Reads and writes a store's files: in a local folder, or wherever fsspec can. Keys are relative
paths of one layout.

A write is all or nothing: a temporary name and a rename locally, a single PUT in object stores.
Links are not followed.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from autotune.errors import AutotuneError, InvalidInput
from autotune.runtime import (
    ESCAPE_CHARACTERS,
    atomic_write,
    describe_url,
    is_clear_url,
    quote_error,
)

KEY = re.compile(
    r"(?P<machine>[0-9a-f]{16})/(?P<architecture>[a-z0-9-]{1,64})/(?P<work>[a-z0-9-]{1,100})/"
    r"(?P<name>[0-9a-f]{64})\.json"
)
"""Path of a record inside a store; no other path is ever read or written."""
FOLDER = re.compile(r"[a-z0-9-]{1,100}")
NUM_FOLDERS = 3


class StoreUnreachable(AutotuneError):
    """A store does not answer, or refuses."""


class LocalFiles:
    """Files in a folder of this machine, e.g. a git checkout. It is empty if it does not exist."""

    def __init__(self, root: Path) -> None:
        self.root, self.address = root, str(root)

    def sizes(self) -> dict[str, int]:
        """Key and bytes of every file that has a place in the layout."""
        with translate_file_errors(self.address):
            return dict(self._scan(self.root, "", NUM_FOLDERS)) if self.root.is_dir() else {}

    def _scan(self, folder: Path | str, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
        with (
            suppress(FileNotFoundError),
            os.scandir(folder) as entries,
        ):  # what is deleted meanwhile is left out
            for entry in entries:
                key = prefix + entry.name
                if depth and FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield from self._scan(entry.path, key + "/", depth - 1)
                elif not depth and KEY.fullmatch(key) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        yield key, entry.stat(follow_symlinks=False).st_size

    def read(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, bytes | Exception]]:
        """The first `size` bytes of each file, or why it cannot be read."""
        for key, size in sizes.items():
            try:
                yield key, self._read_file(key, size)
            except OSError as error:
                yield key, error

    def _read_file(self, key: str, size: int) -> bytes:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(self._path(key), flags)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{key} is not a regular file")
            return file.read(size)

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write each file whole or not at all."""
        with translate_file_errors(self.address):
            for key, content in contents.items():
                with atomic_write(Path(self._path(key))) as part:
                    part.write_bytes(content)

    def delete(self, key: str) -> None:
        with translate_file_errors(self.address):
            Path(self._path(key)).unlink(missing_ok=True)

    def _path(self, key: str) -> str:
        """The path of a key, which must be one of the layout, with no link between the root and
        the file.
        """
        path = self.address
        for folder in _require_key(key).split("/")[:NUM_FOLDERS]:
            path = f"{path}/{folder}"
            if os.path.islink(path):  # noqa: PTH114  a Path takes as long as the reading, thousands of times
                raise OSError(f"a folder of {key} is a link")
        return f"{self.address}/{key}"


class RemoteFiles:
    """Files behind an fsspec file system; every method may raise StoreUnreachable."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url, self.address = url, describe_url(url)
        """The address is for messages, without passwords."""
        with translate_file_errors(self.address, url):
            try:
                self.fs, root = url_to_fs(url, **options)
            except (ImportError, ValueError) as error:
                hint = "install what fsspec needs for it, e.g. `pip install s3fs` for s3://"
                hint = hint if is_clear_url(url) else ESCAPE_CHARACTERS
                raise InvalidInput(
                    f"cannot use {self.address}: {quote_error(error, url)}", hint=hint
                ) from None
        self.root = str(root).rstrip("/")
        self.has_folders = not isinstance(
            self.fs, AsyncFileSystem
        )  # object stores have none, and mkdir makes buckets

    def sizes(self) -> dict[str, int]:
        with translate_file_errors(self.address, self.url):
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
        items = ((path[len(self.root) + 1 :], info) for path, info in found.items())
        return {
            key: int(info.get("size") or 0)
            for key, info in items
            if KEY.fullmatch(key) and not info.get("islink")
        }

    def read(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, bytes | Exception]]:
        with translate_file_errors(self.address, self.url):
            filled = {
                key: size for key, size in sizes.items() if size
            }  # an empty object has no range
            paths = [self._path(key) for key in filled]
            found = self.fs.cat_ranges(
                paths, [0] * len(paths), list(filled.values()), on_error="return"
            )
            for content in found:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content  # the connection failed, not the file
        yield from ((key, b"") for key in sizes if key not in filled)
        yield from zip(filled, found, strict=True)

    def write(self, contents: Mapping[str, bytes]) -> None:
        with translate_file_errors(self.address, self.url):
            if self.has_folders:
                for folder in {self._path(key).rpartition("/")[0] for key in contents}:
                    self.fs.makedirs(folder, exist_ok=True)
            self.fs.pipe({self._path(key): content for key, content in contents.items()})

    def delete(self, key: str) -> None:
        with translate_file_errors(self.address, self.url):
            self.fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self.root}/{_require_key(key)}"


Files = LocalFiles | RemoteFiles


def _require_key(key: str) -> str:
    if not KEY.fullmatch(key):
        raise InvalidInput(
            f"{key!r} is not the path of a record",
            hint="only `autotune profiles` writes into a store",
        )
    return key


@contextmanager
def translate_file_errors(address: str, url: str | None = None) -> Iterator[None]:
    """Turn whatever a file system raises into one error that names the store and hides the
    secrets of its `url`.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:  # file systems raise what their libraries raise
        raise StoreUnreachable(
            f"cannot reach {address}: {type(error).__name__}: {quote_error(error, url)}",
            hint=(
                "check the address, the network and your access, then run it again: what was "
                "written is whole"
            ),
        ) from None  # the chain would show what was left out
