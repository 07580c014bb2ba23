"""Writes files atomically, reads untrusted ones within limits, and shows URLs without passwords."""

import codecs
import errno
import fcntl
import mmap
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import platformdirs
import yaml

from autotune.errors import InvalidInput

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Pattern for files that `atomic_write` was writing when its process was killed.
PART_FILES = f".*.{'[0-9a-f]' * 16}.part"


@contextmanager
def atomic_write(path: Path, *marks: bytes) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path`, with its mode, if nothing
    failed. The bytes are on disk (fsync) before the name changes, and so is the name, if folders
    can be synced, before this returns. A file with none of the `marks`, if there are any, is not
    replaced but refused."""
    part = _new_part(path, *marks)
    try:
        yield part
        _sync(part)
        with suppress(OSError):  # it is new, or others own it
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
        with suppress(OSError):  # some network file systems cannot sync folders
            _sync(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(part)):
            raise OSError(error.errno, error.strerror, str(path)) from error  # the user's name
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> BinaryIO:
    """Open an untrusted file. Raises OSError unless it is regular: a pipe need never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def is_inside(folder: Path, name: str) -> bool:
    """Return whether a file is the folder's own: neither a link, nor in a linked folder."""
    return Path(os.path.realpath(folder / name)) == Path(os.path.realpath(folder)) / name


def decode_text(content: bytes) -> str:
    """Decode UTF-8, or UTF-16 with its mark, as Windows writes it. Raises UnicodeDecodeError."""
    return content.decode("utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read an untrusted file, as `open_regular`, of no more than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        why = f"larger than the {max_bytes >> 10:,} KiB that are read of such a file"
        raise OSError(errno.EFBIG, why, str(path))
    return content


@cache
def read_table(path: str) -> Any:
    """Read a table of the package's own, a YAML file in the folder of a room."""
    text = (files("autotune") / path).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _new_part(path: Path, *marks: bytes) -> Path:
    if SCHEME.match(str(path)):  # a folder would be made that is called like it, login and all
        what = "files are written to this machine, not to a URL"
        raise InvalidInput(what, hint="name a file in one of its folders")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a replaced /dev/null would be a file for everyone
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if marks and path.exists() and not _is_own(path, marks):
        why = f"{path} is there already, and no earlier file of this command"
        raise InvalidInput(why, hint="write to another file with -o, or remove that one")
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the umask
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return part


def _is_own(path: Path, marks: tuple[bytes, ...]) -> bool:
    with open_regular(path) as file:
        if not file.seek(0, os.SEEK_END):  # as `mktemp` makes
            return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(mark) >= 0 for mark in marks)


def require_writable(path: Path, *marks: bytes) -> None:
    """Raise before long work if `atomic_write` will refuse to write `path`, or be unable to."""
    _new_part(path, *marks).unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_path(*parts: str) -> Path:
    """Return a path in the user's cache folder: what lies there can be computed again."""
    return platformdirs.user_cache_path("autotune").joinpath(*parts)


def data_path(*parts: str) -> Path:
    """Return a path in the user's data folder: what lies there would be lost work."""
    return platformdirs.user_data_path("autotune").joinpath(*parts)


def shipped_path(*parts: str) -> Path:
    """Return a path in `profiles/`, which ships with autotune: the catalog of GPUs, and records."""
    return Path(str(files("autotune") / "profiles")).joinpath(*parts)


PREFIX = "autotune-scratch-"
MIN_AGE_SECONDS = 60.0  # a folder that is younger may not be locked yet


def make_scratch_folder(purpose: str) -> "tempfile.TemporaryDirectory[str]":
    """Make a temporary folder that lasts as long as this process, or a `with` block.

    The process holds a lock on it, which the system drops however the process dies. Process ids
    would not do: containers that share a temporary folder see other ids. Other hosts may share one
    whose locks do not reach them: only this host's folders are removed.
    """
    own = f"{PREFIX}{platform.node()}-"
    for path in Path(tempfile.gettempdir()).glob(f"{own}*"):
        with suppress(OSError):  # another process removes it, or it is another user's
            _remove_abandoned(path)
    folder = tempfile.TemporaryDirectory(prefix=f"{own}{purpose}-", ignore_cleanup_errors=True)
    descriptor = os.open(folder.name, os.O_RDONLY)
    weakref.finalize(folder, os.close, descriptor)
    _try_lock(descriptor)
    return folder


def _remove_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        is_old = found.st_mtime < time.time() - MIN_AGE_SECONDS
        if is_old and found.st_uid == os.getuid() and _try_lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


# A URL in which each character can have one meaning only.
URL = re.compile(
    r"(?P<origin>[A-Za-z][\w+.-]*://)(?:(?P<login>[^@/?#;\\]*)@)?(?P<place>[^@?#;\\]*)(?P<rest>[?#;][^@]*)?"
)
SCHEME = re.compile(r"[A-Za-z][\w+.-]+:[/\\]")  # beginning of a URL, or of what was meant to be one
ESCAPE_CHARACTERS = (
    "inside a name or a password write @ as %40, / as %2F, ? as %3F, # as %23 and ; as %3B"
)


def describe_url(url: str) -> str:
    """Show the URL with `***` for what may be secret; if unclear, its scheme alone."""
    parts = URL.fullmatch(url)
    if parts is None:
        origin = URL.match(url)
        return f"{origin['origin'] if origin else ''}***"
    login = "" if parts["login"] is None else "***@"
    return f"{parts['origin']}{login}{parts['place']}{'***' if parts['rest'] else ''}"


def quote_error(error: BaseException, url: str | None = None) -> str:
    """Quote a library's error in a printable line, unless it may repeat a secret of `url`."""
    letters = (letter if letter.isprintable() else " " for letter in str(error))
    text = " ".join("".join(letters).split())
    secrets = _secrets_in(url) if url else set()
    is_quoted = (re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text) for each in secrets or ())
    if secrets is None or any(is_quoted):
        return "what it says is not shown because it may repeat a password"
    return text[:300]


def _secrets_in(url: str) -> set[str] | None:
    parts = URL.fullmatch(url)
    if parts is None:
        return None
    login, rest = parts["login"] or "", parts["rest"] or ""
    secrets = {pair.rpartition("=")[2] for pair in re.split("[?#;&]", rest)}
    secrets.add(login.partition(":")[2] or login)
    secrets |= {unquote(secret) for secret in secrets}
    secrets |= {word for secret in secrets for word in re.findall(r"\w{4,}", secret)}
    return secrets - {""}
