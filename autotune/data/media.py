"""Finds images, videos, masks and control images in a data folder, by their names."""

import importlib.util
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.plan.file import RUN_PLAN_FILE


@dataclass(frozen=True)
class Media:
    """One image or video, or one clip with its frames in order."""

    name: str  # path below the data folder with forward slashes, as `metadata.jsonl` writes it
    path: Path
    frame_paths: tuple[Path, ...]

    @property
    def is_clip(self) -> bool:
        return self.frame_paths != (self.path,)

    @property
    def stem(self) -> str:
        """Name of its caption and its control images, below their folders."""
        return self.name if self.is_clip else Path(self.name).with_suffix("").as_posix()

    @property
    def folder_repeats(self) -> int:
        """Times that it is shown per epoch by the name of the nearest folder that tells."""
        matches = (REPEATS.fullmatch(parent.name) for parent in Path(self.name).parents)
        return max(1, next((int(match[1]) for match in matches if match), 1))


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
REPEATS = re.compile(r"(\d{1,3})_.+")
"""Name of a folder whose images kohya's trainers show so many times per epoch, e.g. `10_dog`."""


def has_video_decoder() -> bool:
    """Return whether PyAV is installed, which decodes video files."""
    return importlib.util.find_spec("av") is not None


def find_media(folder: Path, *, clips: bool, exclude: Path | None = None) -> tuple[Media, ...]:
    """Find the images below `folder`, sorted by name; with `clips` videos and frames, too.

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
        Media(
            path.relative_to(folder).as_posix(), path, tuple(sorted(files, key=_natural_sort_key))
        )
        for path, files in frames.items()
    )
    return tuple(sorted(media, key=lambda one: one.name))


def _readable_suffixes(*, clips: bool) -> frozenset[str]:
    videos = VIDEO_SUFFIXES if has_video_decoder() else frozenset[str]()
    return IMAGE_SUFFIXES | ANIMATION_SUFFIXES | videos if clips else IMAGE_SUFFIXES


def find_unsupported(folder: Path, *, clips: bool, exclude: Path | None = None) -> dict[str, str]:
    """Find media files that are not read, by name, with what to do about each."""
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
    install = "pip install 'lora-autotune[video]'"
    return f"videos are read with PyAV, or as folders of frames: {install}, or {as_frames}"


def find_masks(folder: Path, *, exclude: Path | None = None) -> dict[str, Path]:
    """Find masks below `folder`, by the stem of what they belong to."""
    masks = (path for path in _list_files(folder, exclude) if path.name.endswith(MASK_SUFFIX))
    return {path.relative_to(folder).as_posix().removesuffix(MASK_SUFFIX): path for path in masks}


def find_runs(folder: Path) -> tuple[Path, ...]:
    """Find output folders of runs below `folder`: their pictures are no training data."""
    runs = (file.parent for file in folder.rglob(RUN_PLAN_FILE))
    return tuple(sorted(run for run in runs if run != folder))


def _list_files(folder: Path, exclude: Path | None) -> list[Path]:
    files, excluded = [], {*find_runs(folder), exclude}
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_file = os.path.isfile(path) or path.is_symlink()  # noqa: PTH113  Path's raises without permission
        if not is_hidden and is_file and excluded.isdisjoint(path.parents):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _natural_sort_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


def match_controls(media: Media, by_stem: Mapping[str, Path]) -> tuple[Path, ...]:
    """Find an image's control images: `NAME.*`, or else all of `NAME_1.*`, `NAME_2.*` and so on."""
    if media.stem in by_stem:
        return (by_stem[media.stem],)
    pattern = re.compile(re.escape(media.stem) + r"_(\d+)")
    numbered = {
        int(match[1]): path for stem, path in by_stem.items() if (match := pattern.fullmatch(stem))
    }
    is_complete = sorted(numbered) == list(range(1, len(numbered) + 1))
    return tuple(numbered[number] for number in sorted(numbered)) if is_complete else ()
