"""Reads a folder of captioned images (or clips of frames, or edit pairs) and names every file that is no good.

read_dataset     for training: raises where captions are missing or nothing usable is left
scan_dataset     for the check before it: never raises for the content of a file
"""

import errno
import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from autotune.data.captions import METADATA, Line, UnreadableCaption, complete_caption, read_caption, read_metadata
from autotune.data.files import Found, controls_of, find_items, find_unsupported
from autotune.data.pixels import read_size
from autotune.errors import InvalidInput
from autotune.schema import Frozen

MIN_SIDE_PX = 32
"""Smaller images teach nothing at any resolution that these models are trained at."""

VERIFY_SECONDS = 120.0
"""How long images are decoded to prove them whole; those left over are still caught when they are encoded."""

MOST_NAMED = 5
"""Files that are named one by one where some are left out."""

ProblemKind = Literal["broken", "tiny", "duplicate", "captionless", "control", "metadata", "unsupported", "short"]
Legible = Annotated[str, BeforeValidator(lambda text: str(text).encode("utf-8", "backslashreplace").decode())]
"""A file name may hold bytes that are no UTF-8."""
OnProgress = Callable[[int, int], None]
"""Called with (done, total)."""


class Problem(Frozen):
    """One file that is left out or needs attention."""

    file: Legible
    """Path below the data folder."""
    kind: ProblemKind
    message: Legible


@dataclass(frozen=True)
class Item:
    """One training image, or one clip whose frames lie in a folder."""

    path: Path
    caption: str
    width_px: int
    height_px: int
    control_paths: tuple[Path, ...] = ()
    repeats: int = 1
    """How often it is seen per epoch."""
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
    """The usable items in the order of their names, and what is wrong with the rest."""

    items: tuple[Item, ...]
    problems: tuple[Problem, ...]
    num_unverified: int = 0
    """Items whose pixels were not decoded because time ran out."""

    @property
    def epoch_size(self) -> int:
        """Images per epoch, repeats included."""
        return sum(item.repeats for item in self.items)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is wrong with the rest, for people: the counts, then the first files by name; empty without any."""
        counts = Counter(problem.kind for problem in self.problems)
        told = [f"{problem.file}: {problem.message}" for problem in self.problems[:MOST_NAMED]]
        if len(self.problems) > MOST_NAMED:
            told.append(f"and {len(self.problems) - MOST_NAMED} more: `autotune data check` names all")
        summary = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        return (f"left out of the data: {summary}", *told) if told else ()


@dataclass(frozen=True)
class Reading:
    """How a data folder is to be understood."""

    caption: str | None = None
    """For images that have none."""
    trigger: str | None = None
    """Word put in front of every caption that lacks it."""
    control: Path | None = None
    """Folder of control images for editing, by the same stems: `NAME.*`, or `NAME_1.*`, `NAME_2.*` ..."""
    num_frames: int = 1
    """Above 1, each subfolder is a clip of which the first `num_frames` images are taken."""


def read_dataset(folder: Path, reading: Reading | None = None) -> Dataset:
    """The usable part of a data folder; files that are no good are left out and named in `problems`.

    Args:
        folder: images with same-stem `.txt` captions or a `metadata.jsonl`; subfolders are read too.
        reading: how.

    Raises:
        InvalidInput: no such folder, images without captions, or nothing usable.
    """
    dataset = scan_dataset(folder, reading)
    captionless = [problem.file for problem in dataset.problems if problem.kind == "captionless"]
    if captionless:
        named = ", ".join(captionless[:3]) + (", ..." if len(captionless) > 3 else "")
        raise InvalidInput(
            f"{len(captionless)} image(s) in {folder} have no caption: {named}",
            hint="write NAME.txt beside each, or give --caption TEXT or --trigger WORD",
        )
    if not dataset.items:
        raise InvalidInput(
            f"no usable image in {folder}" + "".join(f"; {line}" for line in dataset.left_out[:2]),
            hint=f"put png, jpeg or webp files there; `autotune data check {folder}` names what is wrong",
        )
    return dataset


def scan_dataset(folder: Path, reading: Reading | None = None, on_progress: OnProgress | None = None) -> Dataset:
    """As `read_dataset`, but missing captions and an empty folder are problems, not errors.

    Raises:
        InvalidInput: a folder does not exist, the data lies in the control folder, or `num_frames` is not positive.
    """
    _require_folder(folder, "data")
    reading = reading or Reading()
    control = reading.control
    if control is not None:
        _require_folder(control, "control")
        whole, inside = folder.resolve(), control.resolve()
        if whole.is_relative_to(inside):
            raise InvalidInput(
                f"the control folder {control} holds the data folder {folder}",
                hint="put control images into a folder of their own",
            )
        if inside.is_relative_to(whole):  # however it is spelled, its images are no data
            control = folder / inside.relative_to(whole)
    if reading.num_frames < 1:
        raise InvalidInput("frames must be at least 1", hint="leave the option out")
    found = find_items(folder, clips=reading.num_frames > 1, without=control)
    metadata, complaints = read_metadata(folder)
    names = {one.name for one in found}
    complaints += tuple(f"no image {name}" for name in metadata if name not in names)
    problems = [Problem(file=METADATA, kind="metadata", message=complaint) for complaint in complaints]
    problems += [
        Problem(file=name, kind="unsupported", message="its format is not read: convert it to png, jpeg or webp")
        for name in find_unsupported(folder, without=control)
    ]
    controls = {one.stem: one.path for one in find_items(control, clips=False)} if control else {}
    reader = _Reader(reading, metadata, controls, time.monotonic() + VERIFY_SECONDS)
    items: list[tuple[str, Item]] = []
    for one, result in zip(found, _inspect_all(reader, found, on_progress), strict=True):
        if isinstance(result, Item):
            items.append((one.name, result))
        else:
            problems.append(result)
    unique, duplicates = _drop_duplicates(items)
    return Dataset(unique, (*problems, *duplicates), reader.num_unverified)


def _require_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise InvalidInput(f"there is no {what} folder {folder}", hint="check the path")


def _inspect_all(
    reader: "_Reader", found: tuple[Found, ...], on_progress: OnProgress | None
) -> Iterator[Item | Problem]:
    """In order. Threads, because Pillow decodes without holding the interpreter's lock."""
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for done, result in enumerate(pool.map(reader.inspect, found), start=1):
            if on_progress:
                on_progress(done, len(found))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


class _Skip(Exception):
    """Why an item is left out: (kind, message)."""


@dataclass
class _Reader:
    """Makes items of what was found."""

    reading: Reading
    metadata: Mapping[str, Line]
    controls: Mapping[str, Path]
    """By stem."""
    deadline: float
    num_unverified: int = 0

    def inspect(self, found: Found) -> Item | Problem:
        try:
            return self._item(found)
        except _Skip as skip:
            kind, message = skip.args
            return Problem(file=found.name, kind=kind, message=message)

    def _item(self, found: Found) -> Item:
        needed = self.reading.num_frames
        if found.is_clip and len(found.frame_paths) < needed:
            raise _Skip("short", f"has {len(found.frame_paths)} frames, {needed} are needed")
        frames = found.frame_paths[:needed]
        controls = controls_of(found, self.controls)
        if self.reading.control and not controls:
            raise _Skip("control", f"has no control image in {self.reading.control}")
        decode = time.monotonic() < self.deadline
        self.num_unverified += not decode
        sizes = [_size(found, path, decode) for path in (*frames, *controls)]
        return Item(
            path=found.path,
            caption=self._caption(found),
            width_px=sizes[0][0],
            height_px=sizes[0][1],
            control_paths=controls,
            repeats=line.repeats if (line := self.metadata.get(found.name)) else 1,
            frame_paths=frames if found.is_clip else (),
        )

    def _caption(self, found: Found) -> str:
        try:
            own = read_caption(found, self.metadata)
        except UnreadableCaption as error:
            raise _Skip("broken", str(error)) from error
        text = complete_caption(own, caption=self.reading.caption, trigger=self.reading.trigger)
        if not text:
            raise _Skip("captionless", "has no caption")
        return text


def _size(found: Found, path: Path, decode: bool) -> tuple[int, int]:
    where = "" if path == found.path else f"{path.name} "
    try:
        width, height = read_size(path, decode=decode)
    except Exception as error:  # decoders raise anything for damaged files
        reason = getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "")
        raise _Skip("broken", f"{where}cannot be decoded: {reason}") from error
    if min(width, height) < MIN_SIDE_PX:
        raise _Skip("tiny", f"{where}is {width} x {height} px, under {MIN_SIDE_PX} px")
    return width, height


def _drop_duplicates(items: list[tuple[str, Item]]) -> tuple[tuple[Item, ...], tuple[Problem, ...]]:
    """Keep the first of items whose files (controls too) have equal bytes."""
    by_sizes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (_, item) in enumerate(items):
        by_sizes[tuple(path.stat().st_size for path in _files_of(item))].append(index)
    first: dict[tuple[str, ...], str] = {}
    problems: dict[int, Problem] = {}
    for index in sorted(index for group in by_sizes.values() if len(group) > 1 for index in group):
        name, item = items[index]
        original = first.setdefault(tuple(file_digest(path) for path in _files_of(item)), name)
        if original != name:
            problems[index] = Problem(
                file=name, kind="duplicate", message=f"the same image as {original}: `repeats` in {METADATA} weighs it"
            )
    kept = tuple(item for index, (_, item) in enumerate(items) if index not in problems)
    return kept, tuple(problems.values())


def _files_of(item: Item) -> Iterable[Path]:
    return (*item.pixel_paths, *item.control_paths)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex. Raises OSError where it cannot be read; a pipe is not waited for."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
