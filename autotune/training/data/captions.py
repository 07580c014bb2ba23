"""Where captions come from: `metadata.jsonl`, same-stem text files, one caption for all, a trigger word."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from autotune.training.data.files import Found

METADATA = "metadata.jsonl"


class UnreadableCaption(ValueError):
    """A caption file exists but cannot be read."""


def read_metadata(folder: Path) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Captions by file name from `metadata.jsonl` (the imagefolder layout: `file_name`, `text`), and what is wrong.

    A line that is wrong is named and left out; of two lines for one file the first counts.
    """
    captions: dict[str, str] = {}
    complaints: list[str] = []
    path = folder / METADATA
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            name, text = _parse_line(line)
        except ValueError as error:
            complaints.append(f"line {number}: {error}")
            continue
        if name in captions:
            complaints.append(f"line {number}: {name} has a caption already")
        captions.setdefault(name, text)
    return captions, tuple(complaints)


def _parse_line(line: bytes) -> tuple[str, str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise ValueError("no `file_name`")
    if not isinstance(entry.get("text"), str):
        raise ValueError("no `text`")
    return entry["file_name"].removeprefix("./"), entry["text"]


def read_caption(found: Found, metadata: Mapping[str, str]) -> str:
    """The caption of one item in one line, empty where it has none.

    Raises:
        UnreadableCaption: its text file is not UTF-8 or cannot be read.
    """
    text = metadata.get(found.name)
    file = found.path.with_suffix(".txt") if found.path.is_file() else found.path.parent / f"{found.path.name}.txt"
    if text is None and file.is_file():
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UnreadableCaption(f"its caption {file.name} is not UTF-8 text") from error
        except OSError as error:
            raise UnreadableCaption(f"its caption {file.name} cannot be read: {error.strerror}") from error
    return " ".join((text or "").split())


def complete_caption(text: str, *, caption: str | None, trigger: str | None) -> str:
    """`text`, or `caption` where it is empty, with the trigger word in front unless it is in there already."""
    text = text or " ".join((caption or "").split())
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger
