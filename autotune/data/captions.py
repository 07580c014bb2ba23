"""Captions of a folder, read as training reads them, and edited so that it can be undone."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from autotune.data.media import Media, find_captions, find_media, list_contents
from autotune.errors import InvalidInput
from autotune.system.files import read_bounded, write_text_atomic

MAX_CAPTION_BYTES = 1 << 20
MAX_UNDO_BYTES = 64 << 20


class Captioned(NamedTuple):
    """An image with its caption; `is_locked` if that is a line of metadata, or not to be read."""

    media: Media
    caption: str
    is_locked: bool
    file: Path


def read_captions(
    folder: Path, allow: Callable[[Path], bool] = lambda path: True
) -> list[Captioned]:
    """List the images of a folder with their captions, sorted by name; what `allow` refuses is
    left out, and not read."""
    contents = list_contents(folder)
    media = [one for one in find_media(contents, clips=False) if allow(one.path)]
    found, items = find_captions(contents, media), []
    for one in media:
        line, file = found.lines.find(one.name), found.files.get(one.name)
        if line and line.captions:
            items.append(Captioned(one, line.captions[0], True, folder))
        elif file is not None and not allow(file):
            items.append(Captioned(one, "", True, folder))
        else:
            file = file or folder / f"{one.stem}.txt"
            items.append(Captioned(one, _read(file) or "", False, file))
    return items


def _read(file: Path) -> str | None:
    try:
        return read_bounded(file, MAX_CAPTION_BYTES).decode("utf-8-sig", "replace").strip()
    except OSError:
        return None


def edit_captions(
    items: Iterable[Captioned], change: Callable[[Captioned], str], undo_file: Path, what: str
) -> int:
    """Write what `change` makes of each caption that can be edited, and return how many changed;
    `undo_file` keeps what they were."""
    edits = []
    for one in items:
        text = change(one).replace("\r\n", "\n").strip()
        if not one.is_locked and text != one.caption:
            edits.append((one.file, text, _read(one.file)))
    if edits:
        entry = {"what": what, "was": [(str(file), was) for file, _, was in edits]}
        lines = [json.dumps(entry), *_undo_lines(undo_file)]
        while sum(map(len, lines)) > MAX_UNDO_BYTES and len(lines) > 1:
            lines.pop()
        write_text_atomic(undo_file, "\n".join(lines) + "\n")
    for file, text, _ in edits:
        write_text_atomic(file, text + "\n")
    return len(edits)


def _undo_lines(undo_file: Path) -> list[str]:
    try:
        lines = read_bounded(undo_file, 2 * MAX_UNDO_BYTES).decode().splitlines()
        last = json.loads(lines[0])
        texts = [last["what"], *(text for name, was in last["was"] for text in (name, was or ""))]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return lines if all(isinstance(text, str) for text in texts) else []


def last_edit(undo_file: Path) -> str | None:
    """Tell what was edited last, if anything can be undone."""
    lines = _undo_lines(undo_file)
    return str(json.loads(lines[0])["what"]) if lines else None


def undo_edit(undo_file: Path, allow: Callable[[str], Path]) -> str:
    """Take back what was edited last, and return what it was; `allow` refuses a file that may not
    be written. Raises InvalidInput if there is nothing."""
    lines = _undo_lines(undo_file)
    if not lines:
        raise InvalidInput("there is nothing to undo", hint="captions are as they were")
    entry = json.loads(lines[0])
    for name, was in entry["was"]:
        file = allow(name)
        if was is None:
            file.unlink(missing_ok=True)
        else:
            write_text_atomic(file, was + "\n")
    write_text_atomic(undo_file, "".join(f"{line}\n" for line in lines[1:]))
    return str(entry["what"])
