"""Reads a folder of captioned images (or clips of frames, or edit pairs) and names every file that is unusable.

read_dataset     for training: raises if captions are missing or nothing usable is left
scan_dataset     for the check before it: never raises because of a file's content
"""

import errno
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from autotune.data.captions import (
    METADATA,
    MetadataLine,
    UnreadableCaption,
    complete_caption,
    read_caption,
    read_metadata,
)
from autotune.data.files import Media, find_media, find_runs, find_unsupported, match_controls
from autotune.data.pixels import read_size
from autotune.errors import InvalidInput
from autotune.schema import Frozen

MIN_SIDE_PX = 32
"""Smaller images teach nothing at any resolution that these models are trained at."""

VERIFY_SECONDS = 120.0
"""Time limit for decoding images to prove them whole; damage in the others is found when they are encoded."""

MAX_LISTED_PROBLEMS = 5
"""Unusable files that a summary names one by one."""

ProblemKind = Literal[
    "broken", "tiny", "duplicate", "captionless", "control", "metadata", "unsupported", "short", "run"
]
PrintableStr = Annotated[str, BeforeValidator(lambda text: str(text).encode("utf-8", "backslashreplace").decode())]
"""Text for people; a file name in it may hold bytes that are not UTF-8."""
OnProgress = Callable[[int, int], None]
"""Called with (done, total)."""


class Problem(Frozen):
    """One file that is left out or needs attention."""

    file: PrintableStr
    """Path below the data folder."""
    kind: ProblemKind
    message: PrintableStr


@dataclass(frozen=True)
class Item:
    """One training image, or one clip whose frames lie in a folder."""

    path: Path
    caption: str
    width_px: int
    height_px: int
    control_paths: tuple[Path, ...] = ()
    repeats: int = 1
    """Number of times that it is seen per epoch."""
    frame_paths: tuple[Path, ...] = ()
    """The frames of a clip in order; empty for an image."""

    @property
    def num_frames(self) -> int:
        return len(self.pixel_paths)

    @property
    def pixel_paths(self) -> tuple[Path, ...]:
        """The files that hold its pixels, in order."""
        return self.frame_paths or (self.path,)


@dataclass(frozen=True)
class Dataset:
    """The usable items, sorted by name, and what is wrong with the other files."""

    items: tuple[Item, ...]
    problems: tuple[Problem, ...]
    num_unverified: int = 0
    """Items whose pixels were not decoded because time ran out."""

    @property
    def epoch_size(self) -> int:
        """Images per epoch, repeats included."""
        return sum(item.repeats for item in self.items)

    @property
    def problem_summary(self) -> tuple[str, ...]:
        """Lines that tell a user what is left out: counts, then the first files by name; empty without problems."""
        if not self.problems:
            return ()
        counts = Counter(problem.kind for problem in self.problems)
        lines = ["left out of the data: " + ", ".join(f"{number} {kind}" for kind, number in counts.items())]
        lines += [f"{problem.file}: {problem.message}" for problem in self.problems[:MAX_LISTED_PROBLEMS]]
        if (more := len(self.problems) - MAX_LISTED_PROBLEMS) > 0:
            lines.append(f"and {more} more: `autotune data check --json` names all")
        return tuple(lines)


@dataclass(frozen=True)
class DatasetOptions:
    """How the files of a data folder become training items."""

    caption: str | None = None
    """Caption for images that have none."""
    trigger: str | None = None
    """Word put in front of every caption that lacks it."""
    control: Path | None = None
    """Folder of control images for editing, by the same stems: `NAME.*`, or `NAME_1.*`, `NAME_2.*` ..."""
    num_frames: int = 1
    """Above 1, each subfolder is a clip of which the first `num_frames` images are used."""


def read_dataset(folder: Path, options: DatasetOptions = DatasetOptions()) -> Dataset:
    """Read the usable part of a data folder; unusable files are left out and named in `problems`.

    Args:
        folder: images with `.txt` captions of the same stem or a `metadata.jsonl`; subfolders are read too.
        options: captions, control images and clips.

    Raises:
        InvalidInput: the folder does not exist, images lack captions, or nothing is usable.
    """
    dataset = scan_dataset(folder, options)
    captionless = [problem.file for problem in dataset.problems if problem.kind == "captionless"]
    if captionless:
        named = ", ".join(captionless[:3]) + (", ..." if len(captionless) > 3 else "")
        raise InvalidInput(
            f"{len(captionless)} image(s) in {folder} have no caption: {named}",
            hint="write NAME.txt next to each, or give --caption TEXT or --trigger WORD",
        )
    if not dataset.items:
        raise InvalidInput(
            f"no usable image in {folder}" + "".join(f"; {line}" for line in dataset.problem_summary[:2]),
            hint=f"put png, jpeg or webp files there; `autotune data check {folder}` names what is wrong",
        )
    return dataset


def scan_dataset(
    folder: Path, options: DatasetOptions = DatasetOptions(), on_progress: OnProgress | None = None
) -> Dataset:
    """As `read_dataset`, but missing captions and an empty folder are problems, not errors.

    Raises:
        InvalidInput: a folder does not exist, the data lies in the control folder, or `num_frames` is not positive.
    """
    if options.num_frames < 1:
        raise InvalidInput("frames must be at least 1", hint="leave the option out")
    _require_folder(folder, "data")
    control = _locate_control(folder, options.control) if options.control else None
    media = find_media(folder, clips=options.num_frames > 1, exclude=control)
    metadata, line_problems = read_metadata(folder)
    unmatched = metadata.keys() - {one.name for one in media}
    line_problems += tuple(f"no image {name}" for name in metadata if name in unmatched)
    problems = [Problem(file=METADATA, kind="metadata", message=message) for message in line_problems]
    problems += [
        Problem(file=name, kind="unsupported", message=message)
        for name, message in find_unsupported(folder, exclude=control).items()
    ]
    problems += [
        Problem(file=run.relative_to(folder).as_posix(), kind="run", message="the output folder of a run, not data")
        for run in find_runs(folder)
    ]
    controls = {one.stem: one.path for one in find_media(control, clips=False)} if control else {}
    reader = _ItemReader(options, metadata, controls, time.monotonic() + VERIFY_SECONDS)
    items: list[tuple[str, Item]] = []
    for one, result in zip(media, _read_items(reader, media, on_progress), strict=True):
        if isinstance(result, Item):
            items.append((one.name, result))
        else:
            problems.append(result)
    unique, duplicates = _drop_duplicates(items, reader.captioned)
    problems += [
        Problem(file=name, kind="captionless", message="has no caption") for name, item in unique if not item.caption
    ]
    usable = tuple(item for _, item in unique if item.caption)
    return Dataset(usable, (*problems, *duplicates), reader.num_unverified)


def _locate_control(folder: Path, control: Path) -> Path:
    """The control folder, spelled below the data folder if it lies there, so that its images are not taken for data."""
    _require_folder(control, "control")
    data, inside = Path(os.path.realpath(folder)), Path(os.path.realpath(control))
    if data.is_relative_to(inside):
        raise InvalidInput(
            f"the control folder {control} holds the data folder {folder}",
            hint="put control images into a folder of their own",
        )
    return folder / inside.relative_to(data) if inside.is_relative_to(data) else control


def _require_folder(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise InvalidInput(f"there is no {kind} folder {folder}", hint="check the path")


def _read_items(
    reader: "_ItemReader", media: tuple[Media, ...], on_progress: OnProgress | None
) -> Iterator[Item | Problem]:
    """In order, from threads: Pillow decodes without holding the interpreter's lock."""
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for done, result in enumerate(pool.map(reader.read, media), start=1):
            if on_progress:
                on_progress(done, len(media))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


class _Unusable(Exception):
    """Why an item is left out: (kind, message)."""


@dataclass
class _ItemReader:
    """Turns images and clips into items."""

    options: DatasetOptions
    metadata: Mapping[str, MetadataLine]
    controls: Mapping[str, Path]
    """Control images by stem."""
    deadline: float
    """Monotonic time after which pixels are no longer decoded."""
    num_unverified: int = 0
    captioned: set[str] = field(default_factory=set)
    """Names of what has a caption of its own."""

    def read(self, media: Media) -> Item | Problem:
        try:
            return self._read(media)
        except _Unusable as error:
            kind, message = error.args
            return Problem(file=media.name, kind=kind, message=message)

    def _read(self, media: Media) -> Item:
        needed = self.options.num_frames
        if media.is_clip and len(media.frame_paths) < needed:
            raise _Unusable("short", f"has {len(media.frame_paths)} frames, {needed} are needed")
        frames = media.frame_paths[:needed]
        controls = match_controls(media, self.controls)
        if self.options.control and not controls:
            raise _Unusable("control", f"has no control image in {self.options.control}")
        decode = time.monotonic() < self.deadline
        self.num_unverified += not decode
        sizes = [_read_size(media, path, decode) for path in (*frames, *controls)]
        line = self.metadata.get(media.name)
        return Item(
            path=media.path,
            caption=self._read_caption(media),
            width_px=sizes[0][0],
            height_px=sizes[0][1],
            control_paths=controls,
            repeats=(line and line.repeats) or media.folder_repeats,
            frame_paths=frames if media.is_clip else (),
        )

    def _read_caption(self, media: Media) -> str:
        try:
            own = read_caption(media, self.metadata)
        except UnreadableCaption as error:
            raise _Unusable("broken", str(error)) from error
        if own:
            self.captioned.add(media.name)
        return complete_caption(own, caption=self.options.caption, trigger=self.options.trigger)


def _read_size(media: Media, path: Path, decode: bool) -> tuple[int, int]:
    subject = "" if path == media.path else f"{path.name} "
    try:
        width, height = read_size(path, decode=decode)
    except Exception as error:  # decoders raise anything for damaged files
        reason = getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "")
        raise _Unusable("broken", f"{subject}cannot be decoded: {reason}") from error
    if min(width, height) < MIN_SIDE_PX:
        raise _Unusable("tiny", f"{subject}is {width} x {height} px, under {MIN_SIDE_PX} px")
    return width, height


def _drop_duplicates(
    items: list[tuple[str, Item]], captioned: Collection[str]
) -> tuple[list[tuple[str, Item]], list[Problem]]:
    """Keep one of items whose files (controls too) have equal bytes: the first that is `captioned`, if any is."""
    files = [(*item.pixel_paths, *item.control_paths) for _, item in items]
    sizes = [tuple(path.stat().st_size for path in paths) for paths in files]
    num_of_sizes = Counter(sizes)
    first: dict[tuple[str, ...], str] = {}
    unique: list[tuple[str, Item]] = []
    problems: list[Problem] = []
    known = sorted(zip(items, files, sizes, strict=True), key=lambda one: one[0][0] not in captioned)
    for (name, item), paths, size in known:
        is_alone = num_of_sizes[size] == 1  # then it need not be read
        original = name if is_alone else first.setdefault(tuple(map(file_digest, paths)), name)
        if original == name:
            unique.append((name, item))
        else:
            message = f"the same image as {original}: `repeats` in {METADATA} weighs it"
            problems.append(Problem(file=name, kind="duplicate", message=message))
    return sorted(unique, key=lambda one: one[0]), problems


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex.

    Raises:
        OSError: it cannot be read or is not a regular file, such as a pipe that might be waited for without end.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
