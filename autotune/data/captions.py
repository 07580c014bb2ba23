"""Captions of a folder, read as training reads them, and edited so that it can be undone."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from autotune.data.items import MAX_CAPTION_BYTES, add_trigger
from autotune.data.media import Media, find_captions, find_media, list_contents
from autotune.errors import InvalidInput
from autotune.system.files import data_path, read_bounded, write_text_atomic

MAX_UNDO_BYTES = 64 << 20
NOTHING: Mapping[str, str] = MappingProxyType({})


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
    free = [one for one in items if not one.is_locked]
    if at_once and free:
        _remember(folder, free, what)
    edits = []
    for one in free:
        text = change(one).replace("\r\n", "\n").strip()
        if text != one.caption:
            edits.append((one, text))
            if at_once:
                write_text_atomic(one.file, text + "\n")
    if edits and not (at_once or dry_run):
        _remember(folder, [one for one, _ in edits], what)
        for one, text in edits:
            write_text_atomic(one.file, text + "\n")
    return {one.media.name: text for one, text in edits}


def _remember(folder: Path, items: Iterable[Captioned], what: str) -> None:
    entry = {"what": what, "was": [(str(one.file), _read(one.file)) for one in items]}
    lines = [json.dumps(entry), *_undo_lines(folder)]
    while sum(map(len, lines)) > MAX_UNDO_BYTES and len(lines) > 1:
        lines.pop()
    _undo_file(folder).parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(_undo_file(folder), "\n".join(lines) + "\n")


def _undo_file(folder: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]
    return data_path("captions", f"{key}.jsonl")


def _undo_lines(folder: Path) -> list[str]:
    try:
        lines = read_bounded(_undo_file(folder), 2 * MAX_UNDO_BYTES).decode().splitlines()
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
            write_text_atomic(file, was + "\n")
    write_text_atomic(_undo_file(folder), "".join(f"{line}\n" for line in lines[1:]))
    return str(entry["what"])
