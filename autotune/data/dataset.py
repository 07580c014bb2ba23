"""Reads a folder of captioned images (or clips of frames, or edit pairs) and names every file that
is unusable.

read_dataset     for training: raises if captions are missing or nothing usable is left
scan_dataset     for the check before it: never raises because of a file's content
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.data.items import (
    DEFAULT_OPTIONS,
    METADATA,
    REMARKS,
    DatasetOptions,
    Item,
    ItemReader,
    Problem,
    file_digest,
    read_metadata,
)
from autotune.data.media import (
    MASK_SUFFIX,
    Media,
    find_masks,
    find_media,
    find_runs,
    find_unsupported,
)
from autotune.errors import InvalidInput
from autotune.plan.base import Frozen
from autotune.plan.file import read_listing
from autotune.plan.job import DataPlace, Place, each_place

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
    for place, kind in ((folder, "data"), (options.control, "control")):
        if place and not place.is_dir():
            raise InvalidInput(f"there is no {kind} folder {place}", hint="check the path")
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
    data, inside = Path(os.path.realpath(folder)), Path(os.path.realpath(control))
    if data.is_relative_to(inside):
        raise InvalidInput(
            f"the control folder {control} holds the data folder {folder}",
            hint="put control images into a folder of their own",
        )
    return folder / inside.relative_to(data) if inside.is_relative_to(data) else control


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


SUFFIXES = (".yaml", ".yml")


class DataFolder(Frozen):
    """One folder of a job's data."""

    path: Place
    """The folder; a relative one is relative to the file that lists it."""
    repeats: int = Field(default=1, ge=1, le=1000)
    """Number of times that each image is seen per epoch, times what its folder's name or
    `metadata.jsonl` says."""
    weight: float = Field(default=1.0, gt=0, le=100)
    """Factor of the loss on its images."""
    caption: str | None = None
    """Caption of images that have none; the job's by default."""
    trigger: str | None = None
    """Word put in front of every caption that lacks it; the job's by default."""
    control: Place | None = None
    """Folder of control images, by the same stems."""
    regularization: bool = False
    """Whether its images show what the model shall not forget (prior preservation): no trigger
    goes before their captions."""

    def options(self, job: DatasetOptions) -> DatasetOptions:
        """How its files are read, in a job whose options are `job`."""
        return replace(
            job,
            caption=self.caption or job.caption,
            trigger=None if self.regularization else self.trigger or job.trigger,
            control=Path(self.control) if self.control else job.control,
        )


class _DataFile(Frozen):
    folders: tuple[DataFolder, ...] = Field(min_length=1, max_length=100)


def data_text(data: DataPlace) -> str:
    """Where data lies, for a message."""
    return ", ".join(each_place(data))


def is_list(data: DataPlace) -> bool:
    """Whether data is several places, or named by a file that lists folders."""
    return not isinstance(data, str | Path) or Path(data).suffix.lower() in SUFFIXES


def list_folders(data: DataPlace) -> tuple[DataFolder, ...]:
    """The folders of a job's data: of the files that list them, or the folders themselves.

    Raises:
        InvalidInput: a file cannot be read, or is no such list; a place is named twice; or a folder
            lies in another, whose images are read with all below it.
    """
    folders = tuple(folder for place in each_place(data) for folder in _listed(Path(place)))
    _require_apart([folder.path for folder in folders])
    return folders


def _require_apart(folders: Sequence[str]) -> None:
    real = [os.path.realpath(folder) for folder in folders]
    if twice := next(
        (folder for folder, one in zip(folders, real, strict=True) if real.count(one) > 1), None
    ):
        hint = (
            "name it once; `repeats` in a data.yaml shows its images more often (docs/training.md)"
        )
        raise InvalidInput(f"the data names {twice} twice", hint=hint)
    by_real = {Path(one): folder for one, folder in zip(real, folders, strict=True)}
    for inner, folder in by_real.items():
        if outer := next((by_real[parent] for parent in inner.parents if parent in by_real), None):
            raise InvalidInput(
                f"the data folder {folder} lies in {outer}, so its images would be trained twice",
                hint="name the outer folder alone; `repeats` in its metadata.jsonl, or a name such "
                "as 3_portraits, "
                "shows some images more often",
            )


def _listed(data: Path) -> tuple[DataFolder, ...]:
    if not is_list(data) or data.is_dir():
        return (DataFolder(path=str(data)),)
    hint = "write `folders:` with an entry `- path: FOLDER` for each; see docs/training.md"
    listed = read_listing(data, _DataFile, "data folders", hint).folders
    return tuple(one.changed(**_places(one, data.parent)) for one in listed)


def list_places(data: DataPlace) -> tuple[str, ...]:
    """All folders that a job's data lies in: images, and control images that a list names.

    Raises:
        InvalidInput: as `list_folders`.
    """
    return tuple(
        place
        for one in list_folders(data)
        for place in (one.path, one.control)
        if place is not None
    )


def _places(folder: DataFolder, base: Path) -> dict[str, Any]:
    named = {"path": folder.path, "control": folder.control}
    return {name: str(base / place) for name, place in named.items() if place is not None}


MAX_HELD_OUT = 32
"""Images that are held out at most: more would tell little more, cost time and not train."""


@dataclass(frozen=True)
class SplitDataset:
    """A dataset whose images are trained on, or held out."""

    training: Dataset
    held_out: tuple[Item, ...] = ()

    @property
    def whole(self) -> Dataset:
        """All images together: what is encoded, and what decides shapes and lengths."""
        return replace(self.training, items=(*self.training.items, *self.held_out))


def read_split(
    folder: DataPlace, options: DatasetOptions, validation: str | None, seed: int
) -> SplitDataset:
    """Read a data folder and hold some images out: a pure function of seed and file names decides
    which.

    `validation` is a share such as `10%`, a folder of held-out images, or None for none. What lies
    in that folder, and equal files elsewhere, are not trained on.

    Raises:
        InvalidInput: as `read_dataset` for either folder; or nothing would be left to train on.
    """
    dataset = read_dataset(folder, options)
    if validation is None:
        return SplitDataset(dataset)
    place, candidates, share = folder, dataset.items, 1.0
    if validation.endswith("%"):
        share = float(validation[:-1]) / 100
    else:
        place = Path(validation)
        candidates = read_dataset(place, options).items
        dataset = replace(dataset, items=_without_copies(dataset.items, candidates))
    names = _draw([_name(item, place) for item in candidates], share, seed)
    held_out = [item for item in candidates if _name(item, place) in names]
    training = tuple(item for item in dataset.items if item not in held_out)
    if not training:
        raise InvalidInput(
            f"with the images held out for validation, none of {data_text(folder)} is left to "
            "train on",
            hint=(
                "add images, hold out a smaller share, or name a folder of others: --validation "
                "FOLDER"
            ),
        )
    return SplitDataset(replace(dataset, items=training), tuple(held_out))


def _name(item: Item, folder: DataPlace) -> str:
    """The path below the data folder, or below the folder of a list that it lies in, after that
    folder's name.

    The second of several folders of one name gets a number: names tell apart what is drawn.
    """
    places = [Path(place) for place in list_places(folder)]
    at = next(at for at, place in enumerate(places) if item.path.is_relative_to(place))
    place, earlier = (
        places[at],
        len({one for one in places[:at] if one.name == places[at].name} - {places[at]}),
    )
    own = item.path.relative_to(place).as_posix()
    return own if len(places) == 1 else f"{place.name}{f' {earlier + 1}' if earlier else ''}/{own}"


def _draw(names: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """That share of the names, at least one and at most `MAX_HELD_OUT`: an added file changes
    few of the others."""
    unique = sorted(
        set(names),
        key=lambda name: hashlib.sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest(),
    )
    return frozenset(unique[: min(MAX_HELD_OUT, max(1, round(share * len(unique))))])


def _without_copies(items: Sequence[Item], held_out: Sequence[Item]) -> tuple[Item, ...]:
    """The items whose pixels are none of the held-out ones'; only files of equal sizes are read."""
    sizes = {path.stat().st_size for item in held_out for path in item.pixel_paths}
    digests = {file_digest(path) for item in held_out for path in item.pixel_paths}
    return tuple(
        item
        for item in items
        if not any(
            path.stat().st_size in sizes and file_digest(path) in digests
            for path in item.pixel_paths
        )
    )
