"""What lies in a data folder: images, clips of frames, control images. Looks at names only and opens nothing."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
UNSUPPORTED_SUFFIXES = frozenset(
    {".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".mp4", ".mov", ".mkv", ".webm", ".avi"}
)
"""Images and videos that people expect to be read and that are not: they are named instead of ignored."""


@dataclass(frozen=True)
class Media:
    """One image, or one clip with its frames in order."""

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


def find_media(folder: Path, *, clips: bool, exclude: Path | None = None) -> tuple[Media, ...]:
    """Find the images below `folder`, sorted by name; with `clips`, each folder of images below it is one clip.

    Hidden files and folders are ignored, and so is everything below `exclude` (a control folder inside the data).
    """
    paths = [path for path in _list_files(folder, exclude) if path.suffix.lower() in IMAGE_SUFFIXES]
    frames: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        if clips and path.parent != folder:
            frames[path.parent].append(path)
        else:
            frames[path] = [path]
    media = (
        Media(path.relative_to(folder).as_posix(), path, tuple(sorted(files, key=natural_sort_key)))
        for path, files in frames.items()
    )
    return tuple(sorted(media, key=lambda one: one.name))


def find_unsupported(folder: Path, *, exclude: Path | None = None) -> tuple[str, ...]:
    """Names of media files in a format that is not read."""
    paths = (path for path in _list_files(folder, exclude) if path.suffix.lower() in UNSUPPORTED_SUFFIXES)
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def _list_files(folder: Path, exclude: Path | None) -> list[Path]:
    files = []
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_file = os.path.isfile(path) or path.is_symlink()  # noqa: PTH113  Path's raises without permission
        if not is_hidden and is_file and (exclude is None or exclude not in path.parents):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def natural_sort_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts `frame_2` before `frame_10`."""
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


def match_controls(media: Media, by_stem: Mapping[str, Path]) -> tuple[Path, ...]:
    """Control images of an image: `NAME.*`, or else `NAME_1.*`, `NAME_2.*` and so on; empty if any is missing."""
    if media.stem in by_stem:
        return (by_stem[media.stem],)
    pattern = re.compile(re.escape(media.stem) + r"_(\d+)")
    numbered = {int(match[1]): path for stem, path in by_stem.items() if (match := pattern.fullmatch(stem))}
    is_complete = sorted(numbered) == list(range(1, len(numbered) + 1))
    return tuple(numbered[number] for number in sorted(numbered)) if is_complete else ()
