"""Captions and weights of images: `metadata.jsonl`, same-stem text files, one caption for all, a trigger word."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.data.files import Found

METADATA = "metadata.jsonl"
MAX_REPEATS = 1000

EMPTY_CAPTION = ""
"""What a sample is conditioned on where its caption is dropped."""


@dataclass(frozen=True)
class Line:
    """What `metadata.jsonl` says of one file."""

    text: str | None
    """None leaves it to its text file."""
    repeats: int = 1
    """How often it is seen per epoch."""


class UnreadableCaption(ValueError):
    """A caption file exists but cannot be read."""


def read_metadata(folder: Path) -> tuple[Mapping[str, Line], tuple[str, ...]]:
    """Lines of `metadata.jsonl` by file name (the imagefolder layout: `file_name`, `text`; `repeats`, a field of ours,
    weighs an image, and with it `text` may be left out), and what is wrong.

    A line that is wrong is named and left out; of two lines for one file the first counts.
    """
    entries: dict[str, Line] = {}
    complaints: list[str] = []
    path = folder / METADATA
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            name, entry = _parse_line(line)
        except ValueError as error:
            complaints.append(f"line {number}: {error}")
            continue
        if name in entries:
            complaints.append(f"line {number}: {name} has a line already")
        entries.setdefault(name, entry)
    return entries, tuple(complaints)


def _parse_line(line: bytes) -> tuple[str, Line]:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()  # half a character, as in "\ud83d", is JSON but no text
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON, or not UTF-8") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise ValueError("no `file_name`")
    text, repeats = entry.get("text"), entry.get("repeats", 1)
    if not isinstance(text, str) and not (text is None and "repeats" in entry):
        raise ValueError("no `text`")
    if type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS:
        raise ValueError(f"`repeats` is no whole number from 1 to {MAX_REPEATS}")
    return entry["file_name"].removeprefix("./"), Line(text, repeats)


def read_caption(found: Found, metadata: Mapping[str, Line]) -> str:
    """The caption of one item in one line, empty where it has none.

    Raises:
        UnreadableCaption: its text file is not UTF-8 or cannot be read.
    """
    line = metadata.get(found.name)
    text = line.text if line else None
    file = found.path.parent / f"{Path(found.stem).name}.txt"
    if text is None and file.is_file():
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not UTF-8 text"
            raise UnreadableCaption(f"its caption {file.name} {why}") from error
    return " ".join((text or "").split())


def complete_caption(text: str, *, caption: str | None, trigger: str | None) -> str:
    """`text`, or `caption` where it is empty, with the trigger word in front unless it is in there already."""
    text = text or " ".join((caption or "").split())
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger
