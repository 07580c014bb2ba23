"""What lies in a data folder: images, clips of frames, control images. Looks at names only, opens nothing."""

import re
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
        if not hidden and path.is_file() and (without is None or without not in path.parents):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def natural_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts `frame_2` before `frame_10`."""
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


class Controls:
    """The images of a control folder by the stem of the image they belong to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_stem = {
            Path(found.name).with_suffix("").as_posix(): found.path for found in find_items(folder, clips=False)
        }

    def of(self, found: Found) -> tuple[Path, ...]:
        """`NAME.*`, or else `NAME_1.*`, `NAME_2.*` and on without a gap; empty where a control is missing."""
        stem = Path(found.name).with_suffix("").as_posix() if found.path.is_file() else found.name
        if stem in self._by_stem:
            return (self._by_stem[stem],)
        pattern = re.compile(re.escape(stem) + r"_(\d+)")
        numbered = {int(match[1]): name for name in self._by_stem if (match := pattern.fullmatch(name))}
        if sorted(numbered) != list(range(1, len(numbered) + 1)):
            return ()
        return tuple(self._by_stem[numbered[number]] for number in sorted(numbered))
