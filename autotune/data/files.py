"""What lies in a data folder: images, clips of frames, control images. Looks at names only, opens nothing."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
OTHER_MEDIA_SUFFIXES = frozenset(
    {".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".mp4", ".mov", ".mkv", ".webm", ".avi"}
)
"""Pictures and films that people expect to be read and that are not: they are named instead of passed over."""


@dataclass(frozen=True)
class Found:
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
        """What its caption and its controls are called after, below their folders."""
        return self.name if self.is_clip else Path(self.name).with_suffix("").as_posix()


def find_items(folder: Path, *, clips: bool, without: Path | None = None) -> tuple[Found, ...]:
    """Images below `folder` in the order of their names; with `clips`, each folder of images below it is one item.

    Hidden files and folders are passed over, and so is all below `without` (a control folder inside the data).
    """
    paths = [path for path in _files(folder, without) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not clips:
        return tuple(Found(path.relative_to(folder).as_posix(), path, (path,)) for path in paths)
    images = [Found(path.name, path, (path,)) for path in paths if path.parent == folder]
    parents = sorted({path.parent for path in paths} - {folder})
    frames = {parent: sorted((p for p in paths if p.parent == parent), key=natural_key) for parent in parents}
    folders = [Found(parent.relative_to(folder).as_posix(), parent, tuple(frames[parent])) for parent in parents]
    return tuple(sorted(images + folders, key=lambda found: found.name))


def find_unsupported(folder: Path, *, without: Path | None = None) -> tuple[str, ...]:
    """Names of media files whose format is not read."""
    paths = (path for path in _files(folder, without) if path.suffix.lower() in OTHER_MEDIA_SUFFIXES)
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def _files(folder: Path, without: Path | None) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_file = os.path.isfile(path) or path.is_symlink()  # noqa: PTH113  Path's raises where it may not look
        if not hidden and is_file and (without is None or without not in path.parents):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def natural_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts `frame_2` before `frame_10`."""
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


def controls_of(found: Found, by_stem: Mapping[str, Path]) -> tuple[Path, ...]:
    """`NAME.*`, or else `NAME_1.*`, `NAME_2.*` and on without a gap; empty where a control is missing."""
    if found.stem in by_stem:
        return (by_stem[found.stem],)
    pattern = re.compile(re.escape(found.stem) + r"_(\d+)")
    numbered = {int(match[1]): path for name, path in by_stem.items() if (match := pattern.fullmatch(name))}
    gapless = sorted(numbered) == list(range(1, len(numbered) + 1))
    return tuple(numbered[number] for number in sorted(numbered)) if gapless else ()
