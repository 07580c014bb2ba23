"""Captions and weights of images: `metadata.jsonl`, a text file per image, one caption for all,
a trigger word."""

import importlib.util
import json
import os
import random
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.plan.plan_file import RUN_PLAN_FILE
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
class Media:
    """One image or video, or one clip with its frames in order."""

    name: str
    """Path below the data folder with forward slashes, as `metadata.jsonl` writes it."""
    path: Path
    frame_paths: tuple[Path, ...]

    @property
    def is_clip(self) -> bool:
        """Whether `path` is a folder of frames."""
        return self.frame_paths != (self.path,)

    @property
    def stem(self) -> str:
        """Name that its caption and its control images share, below their folders."""
        return self.name if self.is_clip else Path(self.name).with_suffix("").as_posix()

    @property
    def folder_repeats(self) -> int:
        """Times that it is shown per epoch by the name of the nearest folder that tells; 1 if
        none does."""
        matches = (REPEATS.fullmatch(parent.name) for parent in Path(self.name).parents)
        return max(1, next((int(match[1]) for match in matches if match), 1))


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


IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi"})
ANIMATION_SUFFIXES = frozenset({".gif", ".webp"})
OTHER_VIDEO_SUFFIXES = frozenset(
    {".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".mts", ".m2ts", ".m4v", ".3gp", ".ogv"}
)
UNSUPPORTED_SUFFIXES = (
    VIDEO_SUFFIXES
    | OTHER_VIDEO_SUFFIXES
    | {".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl"}
)
"""Files that people expect to be read: those that are not are named instead of ignored."""
MASK_SUFFIX = ".mask.png"
"""End of the name of a mask: `NAME.mask.png` is that of `NAME.*`."""
REPEATS = re.compile(r"(\d{1,3})_.+")
"""A folder's name by which kohya's trainers show its images so many times per epoch, e.g.
`10_dog`."""


def has_video_decoder() -> bool:
    """Whether PyAV is installed, which decodes video files."""
    return importlib.util.find_spec("av") is not None


def find_media(folder: Path, *, clips: bool, exclude: Path | None = None) -> tuple[Media, ...]:
    """Find the images below `folder`, sorted by name; with `clips` videos too, and each folder of
    images is one clip.

    Hidden files and folders are ignored, and so is everything below `exclude` (a control folder
    inside the data) or in the output folder of a run.
    """
    suffixes = _readable_suffixes(clips=clips)
    files = (path for path in _list_files(folder, exclude) if not path.name.endswith(MASK_SUFFIX))
    paths = [path for path in files if path.suffix.lower() in suffixes]
    frames: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        if clips and path.parent != folder and path.suffix.lower() in IMAGE_SUFFIXES:
            frames[path.parent].append(path)
        else:
            frames[path] = [path]
    media = (
        Media(path.relative_to(folder).as_posix(), path, tuple(sorted(files, key=natural_sort_key)))
        for path, files in frames.items()
    )
    return tuple(sorted(media, key=lambda one: one.name))


def _readable_suffixes(*, clips: bool) -> frozenset[str]:
    videos = VIDEO_SUFFIXES if has_video_decoder() else frozenset[str]()
    return IMAGE_SUFFIXES | ANIMATION_SUFFIXES | videos if clips else IMAGE_SUFFIXES


def find_unsupported(folder: Path, *, clips: bool, exclude: Path | None = None) -> dict[str, str]:
    """Media files that are not read, by name, with what to do about each."""
    suffixes = UNSUPPORTED_SUFFIXES - _readable_suffixes(clips=clips)
    paths = (path for path in _list_files(folder, exclude) if path.suffix.lower() in suffixes)
    return {
        path.relative_to(folder).as_posix(): _explain_unsupported(path, clips=clips)
        for path in paths
    }


def _explain_unsupported(path: Path, *, clips: bool) -> str:
    if path.suffix.lower() not in VIDEO_SUFFIXES | OTHER_VIDEO_SUFFIXES:
        return "its format is not supported: convert it to png, jpeg or webp"
    if not clips:
        return "only models that make clips train on videos, with --frames above 1"
    file, frames = shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")))
    if has_video_decoder():
        return f"its format is not supported, mp4 is: ffmpeg -i {file} {frames}.mp4"
    as_frames = f"mkdir {frames} && ffmpeg -i {file} {frames}/%05d.png"
    if path.suffix.lower() in OTHER_VIDEO_SUFFIXES:
        return f"its format is not supported, a folder of frames is: {as_frames}"
    return (
        "videos are read with PyAV, or as folders of frames: pip install "
        "'lora-autotune[video]', "
        f"or {as_frames}"
    )


def find_masks(folder: Path, *, exclude: Path | None = None) -> dict[str, Path]:
    """Masks below `folder`, by the stem of what they belong to."""
    masks = (path for path in _list_files(folder, exclude) if path.name.endswith(MASK_SUFFIX))
    return {path.relative_to(folder).as_posix().removesuffix(MASK_SUFFIX): path for path in masks}


def find_runs(folder: Path) -> tuple[Path, ...]:
    """Output folders of runs below `folder`: their pictures are no training data."""
    return tuple(
        sorted(file.parent for file in folder.rglob(RUN_PLAN_FILE) if file.parent != folder)
    )


def _list_files(folder: Path, exclude: Path | None) -> list[Path]:
    files, excluded = [], {*find_runs(folder), exclude}
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_file = os.path.isfile(path) or path.is_symlink()  # noqa: PTH113  Path's raises without permission
        if not is_hidden and is_file and excluded.isdisjoint(path.parents):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def natural_sort_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts `frame_2` before `frame_10`."""
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


def match_controls(media: Media, by_stem: Mapping[str, Path]) -> tuple[Path, ...]:
    """Control images of an image: `NAME.*`, or else `NAME_1.*`, `NAME_2.*` and so on; empty if
    any is missing."""
    if media.stem in by_stem:
        return (by_stem[media.stem],)
    pattern = re.compile(re.escape(media.stem) + r"_(\d+)")
    numbered = {
        int(match[1]): path for stem, path in by_stem.items() if (match := pattern.fullmatch(stem))
    }
    is_complete = sorted(numbered) == list(range(1, len(numbered) + 1))
    return tuple(numbered[number] for number in sorted(numbered)) if is_complete else ()
