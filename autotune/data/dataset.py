"""Reads a folder of captioned images (or clips of frames, or edit pairs) and names every file that
is unusable.

read_dataset     for training: raises if captions are missing or nothing usable is left
scan_dataset     for the check before it: never raises because of a file's content
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.data.captions import METADATA, read_metadata
from autotune.data.files import (
    MASK_SUFFIX,
    Media,
    find_masks,
    find_media,
    find_runs,
    find_unsupported,
)
from autotune.data.items import REMARKS, Item, ItemReader, Problem, file_digest
from autotune.data.options import DEFAULT_OPTIONS, DatasetOptions
from autotune.data.sources import data_text, is_list, list_folders
from autotune.errors import InvalidInput
from autotune.plan.job import DataPlace

VERIFY_SECONDS = 120.0
"""Time limit for decoding images to prove them whole; damage in the others is found when they
are encoded."""

MAX_LISTED_PROBLEMS = 5
"""Unusable files that a summary names one by one."""

OnProgress = Callable[[int, int], None]
"""Called with (done, total)."""


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
        """Lines that tell a user what teaches nothing or is left out: counts, the first files by
        name; or no line."""
        untrained = [problem for problem in self.problems if problem.kind == "black"]
        lines = _first_of(untrained, "{} more images have masks that are black everywhere")
        if problems := [problem for problem in self.problems if problem.kind not in REMARKS]:
            counts = Counter(problem.kind for problem in problems)
            lines.append(
                "left out of the data: "
                + ", ".join(f"{number} {kind}" for kind, number in counts.items())
            )
            lines += _first_of(problems, "and {} more: `autotune data check --json` names all")
        return tuple(lines)


def _first_of(problems: Sequence[Problem], rest: str) -> list[str]:
    """A line for each of the first problems, and `rest` with the number of the others."""
    more = len(problems) - MAX_LISTED_PROBLEMS
    lines = [f"{problem.file}: {problem.message}" for problem in problems[:MAX_LISTED_PROBLEMS]]
    return [*lines, rest.format(more)] if more > 0 else lines


def read_dataset(folder: DataPlace, options: DatasetOptions = DEFAULT_OPTIONS) -> Dataset:
    """Read the usable part of a data folder; unusable files are left out and named in `problems`.

    Args:
        folder: images with `.txt` captions of the same stem or a `metadata.jsonl`, subfolders too;
            or a YAML file that lists several such folders; or several of these.
        options: captions, control images and clips.

    Raises:
        InvalidInput: the folder does not exist, images lack captions, or nothing is usable.
    """
    dataset = scan_dataset(folder, options)
    captionless = [problem.file for problem in dataset.problems if problem.kind == "captionless"]
    if captionless:
        named = ", ".join(captionless[:3]) + (", ..." if len(captionless) > 3 else "")
        raise InvalidInput(
            f"{len(captionless)} image(s) in {data_text(folder)} have no caption: {named}",
            hint="write NAME.txt next to each, or give --caption TEXT or --trigger WORD",
        )
    if not dataset.items:
        raise InvalidInput(
            f"no usable image in {data_text(folder)}"
            + "".join(f"; {line}" for line in dataset.problem_summary[:2]),
            hint="put png, jpeg or webp files there; `autotune data check` names what is wrong",
        )
    return dataset


def scan_dataset(
    data: DataPlace,
    options: DatasetOptions = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
    *,
    verify_seconds: float | None = None,
) -> Dataset:
    """As `read_dataset`, but missing captions and an empty folder are problems, not errors.

    `verify_seconds` is the time limit of decoding, `VERIFY_SECONDS` by default; 0 reads headers
    alone.

    Raises:
        InvalidInput: a folder does not exist or lies in another, the data lies in the control
            folder, `num_frames` is not positive, or pairs for editing would be flipped or cropped
            elsewhere than at the center.
    """
    if options.num_frames < 1:
        raise InvalidInput("frames must be at least 1", hint="leave the option out")
    verify_seconds = VERIFY_SECONDS if verify_seconds is None else verify_seconds
    if isinstance(data, str | Path) and not is_list(data):
        return _scan_folder(Path(data), options, on_progress, verify_seconds)
    parts = []
    for folder in list_folders(data):
        part = _scan_folder(Path(folder.path), folder.options(options), on_progress, verify_seconds)
        items = (
            replace(item, repeats=item.repeats * folder.repeats, weight=folder.weight)
            for item in part.items
        )
        named = (problem.changed(file=f"{folder.path}/{problem.file}") for problem in part.problems)
        parts.append(Dataset(tuple(items), tuple(named), part.num_unverified))
    return Dataset(
        tuple(item for part in parts for item in part.items),
        tuple(problem for part in parts for problem in part.problems),
        sum(part.num_unverified for part in parts),
    )


def _scan_folder(
    folder: Path, options: DatasetOptions, on_progress: OnProgress | None, verify_seconds: float
) -> Dataset:
    _require_folder(folder, "data")
    control = _locate_control(folder, options.control) if options.control else None
    if control and (options.flip or options.crop != "center"):
        raise InvalidInput(
            "pairs for editing are neither flipped nor cropped at the top",
            hint="leave --flip and --crop out",
        )
    clips = options.num_frames > 1
    media = find_media(folder, clips=clips, exclude=control)
    metadata, line_problems = read_metadata(folder)
    unmatched = metadata.keys() - {one.name for one in media}
    line_problems += tuple(f"no image {name}" for name in metadata if name in unmatched)
    problems = [
        Problem(file=METADATA, kind="metadata", message=message) for message in line_problems
    ]
    masks = find_masks(folder, exclude=control)
    problems += _other_problems(
        folder, control, options, masks.keys() - {one.stem for one in media}
    )
    controls = {one.stem: one.path for one in find_media(control, clips=False)} if control else {}
    reader = ItemReader(options, metadata, controls, masks, time.monotonic() + verify_seconds)
    items: list[tuple[str, Item]] = []
    for one, results in zip(media, _read_items(reader, media, on_progress), strict=True):
        items += [(one.name, result) for result in results if isinstance(result, Item)]
        problems += [result for result in results if isinstance(result, Problem)]
    unique, duplicates = _drop_duplicates(items, reader.captioned)
    problems += [
        Problem(file=name, kind="captionless", message="has no caption")
        for name, item in unique
        if not item.caption
    ]
    usable = tuple(item for _, item in unique if item.caption)
    return Dataset(usable, (*problems, *duplicates), reader.num_unverified)


def _other_problems(
    folder: Path, control: Path | None, options: DatasetOptions, lone_masks: Collection[str]
) -> list[Problem]:
    """What lies in the folder besides images: unread formats, masks that are not used, outputs
    of runs."""
    unsupported = find_unsupported(folder, clips=options.num_frames > 1, exclude=control)
    found = [
        Problem(file=name, kind="unsupported", message=message)
        for name, message in unsupported.items()
    ]
    is_used = options.loss_mask == "files"
    message = (
        "there is no image of this name" if is_used else "a mask is used with --loss-mask files"
    )
    masks = lone_masks if is_used else find_masks(folder, exclude=control)
    found += [
        Problem(file=f"{stem}{MASK_SUFFIX}", kind="mask", message=message) for stem in sorted(masks)
    ]
    return found + [
        Problem(
            file=run.relative_to(folder).as_posix(),
            kind="run",
            message="the output folder of a run, not data",
        )
        for run in find_runs(folder)
    ]


def _locate_control(folder: Path, control: Path) -> Path:
    """The control folder, spelled below the data folder if it lies there, so that its images are
    not taken for data."""
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
    reader: ItemReader, media: tuple[Media, ...], on_progress: OnProgress | None
) -> Iterator[list[Item | Problem]]:
    """In order, from threads: Pillow and PyAV decode without holding the interpreter's lock."""
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for done, results in enumerate(pool.map(reader.read, media), start=1):
            if on_progress:
                on_progress(done, len(media))
            yield results
    finally:
        pool.shutdown(cancel_futures=True)


def _drop_duplicates(
    items: list[tuple[str, Item]], captioned: Collection[str]
) -> tuple[list[tuple[str, Item]], list[Problem]]:
    """Keep one of items whose files (controls too) have equal bytes: the first that is
    `captioned`, if any is."""
    files = [(*item.pixel_paths, *item.control_paths) for _, item in items]
    sizes = [
        (item.span, *(path.stat().st_size for path in paths))
        for (_, item), paths in zip(items, files, strict=True)
    ]
    num_of_sizes = Counter(sizes)
    first: dict[tuple[str, ...], str] = {}
    unique: list[tuple[str, Item]] = []
    problems: list[Problem] = []
    known = sorted(
        zip(items, files, sizes, strict=True), key=lambda one: one[0][0] not in captioned
    )
    for (name, item), paths, size in known:
        is_alone = num_of_sizes[size] == 1  # then it need not be read
        original = name if is_alone else first.setdefault(tuple(map(file_digest, paths)), name)
        if original == name:
            unique.append((name, item))
        else:
            message = f"the same image as {original}: `repeats` in {METADATA} weighs it"
            problems.append(Problem(file=name, kind="duplicate", message=message))
    return sorted(unique, key=lambda one: one[0]), problems
