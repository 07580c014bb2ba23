"""Captions of a folder, read as training reads them, and edited so that it can be undone."""

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from autotune.data.items import add_trigger, read_caption
from autotune.data.media import CONTROLS, Captions, Media, find_captions, find_media, list_contents
from autotune.errors import InvalidInput
from autotune.system import files

MAX_UNDO_BYTES = 64 << 20
IN_METADATA = "it is a line of metadata: edit that file"
AS_BYTES = ("utf-8", "surrogateescape")  # any bytes become text, and the same bytes again
NOTHING: Mapping[str, str] = MappingProxyType({})


class Captioned(NamedTuple):
    """An image with its caption, and the file of it, or why that is not edited."""

    media: Media
    caption: str
    file: Path
    was: bytes | None = None  # the file's content, if there is one
    locked: str = ""


def read_captions(
    folder: Path, allow: Callable[[Path], bool] = lambda path: True
) -> list[Captioned]:
    """List the images of a folder with their captions, sorted by name; what `allow` refuses is
    left out, and not read."""
    contents = list_contents(folder)
    media = [one for one in find_media(contents, clips=False) if allow(one.path)]
    found = find_captions(contents, media)
    return [_read_caption(one, found, folder, allow) for one in media]


def _read_caption(
    one: Media, found: Captions, folder: Path, allow: Callable[[Path], bool]
) -> Captioned:
    line, file = found.lines.find(one.name), found.files.get(one.name)
    if line and line.captions:
        return Captioned(one, line.captions[0], folder, locked=IN_METADATA)
    is_read, file = file is not None, file or folder / f"{one.stem}.txt"
    if not allow(file) if is_read else os.path.lexists(file):
        return Captioned(one, "", file, locked=f"{file.name} is a link to elsewhere, or no file")
    file = Path(os.path.realpath(file))  # a link is written through
    if not os.path.lexists(file):
        return Captioned(one, "", file)
    try:
        text, was = read_caption(file)
    except ValueError as error:
        return Captioned(one, "", file, locked=str(error))
    return Captioned(one, text.replace("\r\n", "\n").strip(), file, was)


def tell_unread(items: Iterable[Captioned]) -> str:
    """Tell, if there are any, which captions no edit changes because they are not to be read."""
    unread = [one.locked for one in items if one.locked not in ("", IN_METADATA)]
    more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
    return f"left alone: {'; '.join(unread[:3])}{more}" if unread else ""


def _encode(text: str, was: bytes) -> bytes:
    """Encode a caption with the mark and the line ends of what it replaces."""
    text = text.replace("\n", "\r\n") if b"\r" in was else text
    if was.startswith(files.UTF16_MARKS):
        return text.encode("utf-16")
    return text.encode("utf-8-sig" if was.startswith(codecs.BOM_UTF8) else "utf-8")


def reworded(
    text: str, *, trigger: str = "", prefix: str = "", replacements: Mapping[str, str] = NOTHING
) -> str:
    """Replace words of a caption, then put missing prefix and trigger word in front."""
    for find, replacement in replacements.items():
        text = text.replace(find, replacement)
    if text not in ("", trigger) and prefix.strip() not in text:
        text = f"{prefix.rstrip()} {text}"
    return add_trigger(text, trigger)


def edit_captions(
    folder: Path,
    items: Iterable[Captioned],
    change: Callable[[Captioned], str],
    what: str,
    *,
    at_once: bool = False,
    dry_run: bool = False,
) -> dict[str, str]:
    """Write what `change` makes of each caption that can be edited, and return those that changed
    by the names of their images. Each is written `at_once`, or all at the end if nothing went
    wrong; a `dry_run` writes none."""
    free = [one for one in items if not one.locked]
    if at_once and free:
        _remember(folder, free, what)
    edits = []
    for one in free:
        text = CONTROLS.sub("", change(one)).replace("\r\n", "\n").strip()
        if text != one.caption:
            edits.append((one, text, _encode(text + "\n", one.was or b"")))
            if at_once:
                with files.atomic_write(one.file) as part:
                    part.write_bytes(edits[-1][2])
    if edits and not (at_once or dry_run):
        _remember(folder, [one for one, *_ in edits], what)
        for one, _, content in edits:
            with files.atomic_write(one.file) as part:
                part.write_bytes(content)
    return {one.media.name: text for one, text, _ in edits}


def _remember(folder: Path, items: Sequence[Captioned], what: str) -> None:
    texts = (None if one.was is None else one.was.decode(*AS_BYTES) for one in items)
    entry = {"what": what, "was": [*zip((str(one.file) for one in items), texts, strict=True)]}
    lines = [json.dumps(entry), *_undo_lines(folder)]
    while sum(map(len, lines)) > MAX_UNDO_BYTES and len(lines) > 1:
        lines.pop()
    _undo_file(folder).parent.mkdir(parents=True, exist_ok=True)
    files.write_text_atomic(_undo_file(folder), "\n".join(lines) + "\n")


def _undo_file(folder: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]
    return files.data_path("captions", f"{key}.jsonl")


def _undo_lines(folder: Path) -> list[str]:
    try:
        lines = files.read_bounded(_undo_file(folder), 2 * MAX_UNDO_BYTES).decode().splitlines()
        last = json.loads(lines[0])
        texts = [last["what"], *(text for name, was in last["was"] for text in (name, was or ""))]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return lines if all(isinstance(text, str) for text in texts) else []


def last_edit(folder: Path) -> str | None:
    """Tell what was edited last, if anything can be undone."""
    lines = _undo_lines(folder)
    return str(json.loads(lines[0])["what"]) if lines else None


def undo_edit(folder: Path, allow: Callable[[str], Path] = Path) -> str:
    """Take back what was edited last, and return what it was; `allow` refuses a file that may not
    be written. Raises InvalidInput if there is nothing."""
    lines = _undo_lines(folder)
    if not lines:
        raise InvalidInput(f"nothing was edited in {folder}", hint="captions are as they were")
    entry = json.loads(lines[0])
    for name, was in entry["was"]:
        file = allow(name)
        if was is None:
            file.unlink(missing_ok=True)
        else:
            with files.atomic_write(file) as part:
                part.write_bytes(was.encode(*AS_BYTES))
    files.write_text_atomic(_undo_file(folder), "".join(f"{line}\n" for line in lines[1:]))
    return str(entry["what"])
