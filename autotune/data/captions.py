"""Captions and weights of images: `metadata.jsonl`, a text file per image, one caption for all,
a trigger word."""

import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.data.files import Media
from autotune.system.files import read_bounded

METADATA = "metadata.jsonl"
MAX_REPEATS = 1000
MAX_CAPTIONS = 100
"""Maximum number of captions of one image."""
MAX_METADATA_BYTES = 64 << 20
MAX_CAPTION_BYTES = 1 << 20
"""Far above what any text encoder reads."""

EMPTY_CAPTION = ""
"""What a sample is conditioned on if its caption is dropped."""


@dataclass(frozen=True)
class MetadataLine:
    """What `metadata.jsonl` says about one file."""

    text: str | None
    """Caption; None leaves it to the file's own text file."""
    repeats: int | None = None
    """Number of times that the file is seen per epoch; None leaves it to its folder's name."""
    other_texts: tuple[str, ...] = ()
    """Further captions, if it has several."""


class UnreadableCaption(ValueError):
    """A caption file exists but cannot be read."""


def read_metadata(folder: Path) -> tuple[Mapping[str, MetadataLine], tuple[str, ...]]:
    """Read `metadata.jsonl`: its lines by file name, and what is wrong with the others.

    The layout is that of Hugging Face's imagefolder (`file_name`, `text`); `repeats` is a field of
    our own that weighs an image, and with it `text` may be left out. Of two lines for one file the
    first counts.
    """
    lines: dict[str, MetadataLine] = {}
    problems: list[str] = []
    path = folder / METADATA
    try:
        content = read_bounded(path, MAX_METADATA_BYTES)
    except FileNotFoundError:
        return {}, ()
    except OSError as error:
        return {}, (f"cannot be read: {error.strerror}",)
    raw_lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, raw in enumerate(raw_lines, start=1):
        if not raw.strip():
            continue
        try:
            name, line = _parse_line(raw)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if name in lines:
            problems.append(f"line {number}: {name} has a line already")
        lines.setdefault(name, line)
    return lines, tuple(problems)


def _parse_line(raw: bytes) -> tuple[str, MetadataLine]:
    try:
        entry = json.loads(raw)
        json.dumps(
            entry, ensure_ascii=False
        ).encode()  # half a surrogate pair, as in "\ud83d", is JSON but not text
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON, or not UTF-8") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise ValueError("no `file_name`")
    text, repeats = entry.get("text"), entry.get("repeats")
    texts: list[Any] = text if isinstance(text, list) and 0 < len(text) <= MAX_CAPTIONS else [text]
    if not all(isinstance(one, str) for one in texts) and not (text is None and "repeats" in entry):
        raise ValueError("no `text`")
    if "repeats" in entry and (type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS):
        raise ValueError(f"`repeats` is not a whole number from 1 to {MAX_REPEATS}")
    return entry["file_name"].removeprefix("./"), MetadataLine(texts[0], repeats, tuple(texts[1:]))


def read_captions(media: Media, metadata: Mapping[str, MetadataLine]) -> tuple[str, ...]:
    """The captions of one image or clip, each as a single line; a single empty one if it has none.

    Raises:
        UnreadableCaption: its text file is not UTF-8 or cannot be read.
    """
    line = metadata.get(media.name)
    text = line.text if line else None
    file = media.path.parent / f"{Path(media.stem).name}.txt"
    if text is None and os.path.lexists(file):
        try:
            text = read_bounded(file, MAX_CAPTION_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = (
                f"cannot be read: {error.strerror}"
                if isinstance(error, OSError)
                else "is not UTF-8 text"
            )
            raise UnreadableCaption(f"its caption {file.name} {reason}") from error
    others = line.other_texts if line else ()
    return tuple(" ".join((one or "").split()) for one in (text, *others))


def order_tags(text: str, num_orders: int, keep: int, seed: int) -> tuple[str, ...]:
    """A caption's comma-separated tags in up to `num_orders` orders, the written one first; `keep`
    tags stay in front.

    A pure function of its arguments: each order is encoded once.
    """
    tags = [tag.strip() for tag in text.split(",")]
    first, rest = tags[:keep], tags[keep:]
    rng, orders = random.Random(f"{seed} tags {text}"), [text]
    for _ in range(num_orders - 1 if len(rest) > 1 else 0):
        orders.append(", ".join([*first, *rng.sample(rest, len(rest))]))
    return tuple(dict.fromkeys(orders))


def complete_caption(text: str, *, caption: str | None, trigger: str | None) -> str:
    """`text`, or `caption` if it is empty, with the trigger word in front unless it occurs there
    already."""
    text = text or " ".join((caption or "").split())
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger
