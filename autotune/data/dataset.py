"""Read folders of captioned images (or clips, or edit pairs) and name every file that is unusable.

read_dataset     for training: raises if captions are missing or nothing usable is left
check_dataset    before it: reports what training would do, whatever files hold
"""

import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from autotune.data import batches, media
from autotune.data.items import (
    DEFAULT_OPTIONS,
    DatasetOptions,
    Item,
    ItemReader,
    caption_limit,
    file_digest,
    find_cut_captions,
)
from autotune.data.media import PrintableStr, Problem
from autotune.errors import InvalidInput
from autotune.models.family import Family
from autotune.plan import workload
from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.file import read_listing
from autotune.plan.job import DataPlace, PathText, each_place

VERIFY_SECONDS = 120.0  # for decoding images; encoding finds damage in the others
MAX_LISTED_PROBLEMS = 5
MAX_HELD_OUT = 32  # more would tell little more, cost time and not train
MAX_UPSCALING = 1.5  # per side, above which images are counted: blur is learned like any feature
MAX_CROP = 0.25  # share of the area, above which images are named
LIST_SUFFIXES = (".yaml", ".yml")

OnProgress = Callable[[int, int], None]  # called with (done, total)


@dataclass(frozen=True)
class Dataset:
    """The usable items, sorted by name, and what is wrong with the other files."""

    items: tuple[Item, ...]
    problems: tuple[Problem, ...]
    num_unverified: int = 0  # items whose pixels were not decoded because time ran out

    @property
    def epoch_size(self) -> int:
        return sum(item.repeats for item in self.items)

    @property
    def problem_summary(self) -> tuple[str, ...]:
        untrained = [problem for problem in self.problems if problem.kind == "black"]
        lines = _list_first(untrained, "{} more images have masks that are black everywhere")
        if problems := [problem for problem in self.problems if problem.kind not in media.REMARKS]:
            counts = Counter(problem.kind for problem in problems)
            named = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            lines.append(f"left out of the data: {named}")
            lines += _list_first(problems, "and {} more: `autotune data check --json` names all")
        return tuple(lines)


def _list_first(problems: Sequence[Problem], rest: str) -> list[str]:
    more = len(problems) - MAX_LISTED_PROBLEMS
    lines = [f"{problem.file}: {problem.message}" for problem in problems[:MAX_LISTED_PROBLEMS]]
    return [*lines, rest.format(more)] if more > 0 else lines


def read_dataset(data: DataPlace, options: DatasetOptions = DEFAULT_OPTIONS) -> Dataset:
    """Read the usable part of data; unusable files are left out and named in `problems`. Raises
    InvalidInput if a folder does not exist, images lack captions, or nothing is usable."""
    dataset = scan_dataset(data, options)
    captionless = [problem.file for problem in dataset.problems if problem.kind == "captionless"]
    if captionless:
        named = ", ".join(captionless[:3]) + (", ..." if len(captionless) > 3 else "")
        what = f"{len(captionless)} image(s) in {data_text(data)} have no caption: {named}"
        hint = "write NAME.txt next to each, or give --caption TEXT or --trigger WORD"
        raise InvalidInput(what, hint=hint)
    if not dataset.items:
        reasons = "".join(f"; {line}" for line in dataset.problem_summary[:2])
        hint = "put png, jpeg or webp files there; `autotune data check` names what is wrong"
        raise InvalidInput(f"no usable image in {data_text(data)}{reasons}", hint=hint)
    return dataset


def _require_masks(dataset: Dataset, data: DataPlace, options: DatasetOptions) -> None:
    """Raise InvalidInput if masks are asked for and no image has one: each would count whole."""
    is_masked = any(item.mask_path for item in dataset.items)
    if options.loss_mask == "none" or is_masked or not dataset.items:
        return
    hint = f"save the mask of NAME.jpg as NAME{media.MASK_SUFFIX} next to it"
    if options.loss_mask == "alpha":
        hint = "save pictures as png with a transparent background"
    unused = [problem for problem in dataset.problems if problem.kind == "mask"][:2]
    reasons = "".join(f"; {problem.file}: {problem.message}" for problem in unused)
    what = f"no image in {data_text(data)} has a loss mask{reasons}"
    raise InvalidInput(what, hint=f"{hint}, or leave --loss-mask out")


def scan_dataset(
    data: DataPlace,
    options: DatasetOptions = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Read data as `read_dataset`, but nothing that lies in a folder is an error. Raises
    InvalidInput if folders are absent or overlap, or options do not suit pairs for editing."""
    if options.num_frames < 1:
        raise InvalidInput("frames must be at least 1", hint="leave the option out")
    if isinstance(data, str | Path) and not is_list(data):
        return _scan_folder(Path(data), options, on_progress)
    items: list[Item] = []
    problems: list[Problem] = []
    num_unverified = 0
    for folder in list_folders(data):
        part = _scan_folder(Path(folder.path), folder.options(options), on_progress)
        for item in part.items:
            repeats = item.repeats * folder.repeats
            items.append(replace(item, repeats=repeats, weight=folder.weight))
        for problem in part.problems:
            problems.append(problem.changed(file=f"{folder.path}/{problem.file}"))
        num_unverified += part.num_unverified
    return Dataset(tuple(items), tuple(problems), num_unverified)


def _scan_folder(folder: Path, options: DatasetOptions, on_progress: OnProgress | None) -> Dataset:
    for place, kind in ((folder, "data"), (options.control, "control")):
        if place and not place.is_dir():
            raise InvalidInput(f"there is no {kind} folder {place}", hint="check the path")
    control = media.locate_control(folder, options.control) if options.control else None
    if control and (options.flip or options.crop != "center"):
        what = "pairs for editing are neither flipped nor cropped at the top"
        raise InvalidInput(what, hint="leave --flip and --crop out")
    contents = media.list_contents(folder, exclude=control)
    found = media.find_media(contents, clips=options.num_frames > 1)
    captions, masks = media.find_captions(contents, found), media.find_masks(contents)
    unsupported = media.find_unsupported(contents, clips=options.num_frames > 1)
    problems = [*captions.problems, *unsupported, *contents.problems]
    stems, why = {media.fold_name(one.stem) for one in found}, "there is no image of this name"
    if options.loss_mask != "files":
        stems, why = set(), "a mask, which only --loss-mask files uses"
    for stem, path in masks.items():
        if media.fold_name(stem) not in stems:
            problems.append(Problem(file=contents.name(path), kind="mask", message=why))
    controls = media.ByName[tuple[Path, ...]]({})
    if control:
        listed = media.list_contents(control)
        controls, problems = media.find_controls(listed), [*problems, *listed.problems]
    deadline = time.monotonic() + VERIFY_SECONDS
    reader = ItemReader(options, captions, controls, media.ByName(masks), deadline)
    items: list[tuple[str, Item]] = []
    for one, results in zip(found, _read_items(reader, found, on_progress), strict=True):
        items += [(one.name, result) for result in results if isinstance(result, Item)]
        problems += [result for result in results if isinstance(result, Problem)]
    unique, duplicates = _drop_duplicates(items, reader.captioned)
    for name, item in unique:
        if not item.caption:
            problems.append(Problem(file=name, kind="captionless", message="has no caption"))
    usable = tuple(item for _, item in unique if item.caption)
    return Dataset(usable, (*problems, *duplicates), reader.num_unverified)


def _read_items(
    reader: ItemReader, found: tuple[media.Media, ...], on_progress: OnProgress | None
) -> Iterator[list[Item | Problem]]:
    # In order, from threads: Pillow and PyAV decode without holding the interpreter's lock.
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for done, results in enumerate(pool.map(reader.read, found), start=1):
            if on_progress:
                on_progress(done, len(found))
            yield results
    finally:
        pool.shutdown(cancel_futures=True)


def _drop_duplicates(
    items: list[tuple[str, Item]], captioned: Collection[str]
) -> tuple[list[tuple[str, Item]], list[Problem]]:
    entries = []
    for name, item in sorted(items, key=lambda one: one[0] not in captioned):
        paths = (*item.pixel_paths, *item.control_paths)
        entries.append((name, item, paths, (item.span, *(path.stat().st_size for path in paths))))
    num_of_size = Counter(size for *_, size in entries)
    first: dict[tuple[str, ...], str] = {}
    unique: list[tuple[str, Item]] = []
    problems: list[Problem] = []
    for name, item, paths, size in entries:
        original = name
        if num_of_size[size] > 1:  # else it need not be read
            original = first.setdefault(tuple(map(file_digest, paths)), name)
        if original == name:
            unique.append((name, item))
        else:
            more = f"`repeats` in {media.METADATA} shows it more often"
            message = f"the same image as {original}: {more}"
            problems.append(Problem(file=name, kind="duplicate", message=message))
    return sorted(unique, key=lambda one: one[0]), problems


class DataFolder(Frozen):
    """One folder of a job's data."""

    path: PathText  # the folder; a relative one is relative to the file that lists it
    repeats: int = Field(default=1, ge=1, le=1000)
    """Times that each image is seen per epoch, times what its folder or `metadata.jsonl` says."""
    weight: float = Field(default=1.0, gt=0, le=100)  # factor of the loss on its images
    caption: str | None = None  # caption of images that have none; the job's by default
    trigger: str | None = None
    """Word put in front of every caption that lacks it; the job's by default."""
    control: PathText | None = None  # folder of control images, by the same stems
    regularization: bool = False
    """True if its images show what the model must not forget: captions get no trigger."""

    def options(self, job: DatasetOptions) -> DatasetOptions:
        return replace(
            job,
            caption=self.caption or job.caption,
            trigger=None if self.regularization else self.trigger or job.trigger,
            control=Path(self.control) if self.control else job.control,
        )


class _DataFile(Frozen):
    folders: tuple[DataFolder, ...] = Field(min_length=1, max_length=100)


def data_text(data: DataPlace) -> str:
    """Name the places of data in a message."""
    return ", ".join(each_place(data))


def is_list(data: DataPlace) -> bool:
    """Return whether data is several places, or named by a file that lists folders."""
    return not isinstance(data, str | Path) or Path(data).suffix.lower() in LIST_SUFFIXES


def list_folders(data: DataPlace) -> tuple[DataFolder, ...]:
    """List a job's data folders. Raises InvalidInput for one named twice or inside another."""
    folders = tuple(folder for place in each_place(data) for folder in _read_list(Path(place)))
    by_real: dict[Path, str] = {}
    for folder in folders:
        real = Path(os.path.realpath(folder.path))
        if real in by_real:
            hint = "name it once; `repeats` in a data.yaml shows its images more often"
            raise InvalidInput(f"the data names {by_real[real]} twice", hint=hint)
        by_real[real] = folder.path
    for inner, path in by_real.items():
        for parent in inner.parents:
            if parent in by_real:
                what = f"the data folder {path} lies in {by_real[parent]}: it would count twice"
                hint = "name the outer folder alone; a name such as 3_dogs shows images more often"
                raise InvalidInput(what, hint=hint)
    return folders


def _read_list(data: Path) -> tuple[DataFolder, ...]:
    if not is_list(data) or data.is_dir():
        return (DataFolder(path=str(data)),)
    hint = "write `folders:` with an entry `- path: FOLDER` for each; see docs/data.md"
    folders = read_listing(data, _DataFile, "data folders", hint).folders
    base = data.parent
    return tuple(
        one.changed(path=str(base / one.path), control=one.control and str(base / one.control))
        for one in folders
    )


def list_places(data: DataPlace) -> tuple[str, ...]:
    """List all folders of a job's data, of control images too; errors as of `list_folders`."""
    folders = list_folders(data)
    return tuple(place for one in folders for place in (one.path, one.control) if place)


@dataclass(frozen=True)
class SplitDataset:
    """A dataset whose images are trained on, or held out."""

    training: Dataset
    held_out: tuple[Item, ...] = ()

    @property
    def whole(self) -> Dataset:
        return replace(self.training, items=(*self.training.items, *self.held_out))


def read_split(
    data: DataPlace, options: DatasetOptions, validation: str | None, seed: int
) -> SplitDataset:
    """Read data and hold some images out: a pure function of seed and file names decides which.
    `validation` is a share such as `10%`, or a folder, whose images, and equal files elsewhere, are
    not trained on."""
    dataset = read_dataset(data, options)
    _require_masks(dataset, data, options)
    if validation is None:
        return SplitDataset(dataset)
    place, candidates, share = data, dataset.items, 1.0
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
        what = f"validation holds out all images of {data_text(data)}: none is left to train"
        hint = "add images, hold out a smaller share, or name others: --validation FOLDER"
        raise InvalidInput(what, hint=hint)
    return SplitDataset(replace(dataset, items=training), tuple(held_out))


def slider_data(prompts: Sequence[str], width_px: int, height_px: int) -> SplitDataset:
    """Make a slider's two items, without pictures. Raises InvalidInput without three prompts."""
    if len(prompts) != workload.SLIDER_PROMPTS:
        what = f"a slider has {workload.SLIDER_PROMPTS} prompts, not {len(prompts)}"
        hint = "--slider 'an old person' --slider 'a young person' --slider 'a person'"
        raise InvalidInput(what, hint=hint)
    *ends, neutral = prompts
    one = Item(Path("slider"), neutral, width_px, height_px, prior_captions=tuple(ends), slides=1)
    return SplitDataset(Dataset((one, replace(one, slides=-1)), ()))


def _name(item: Item, data: DataPlace) -> str:
    """The path below the data folder; in a list after the folder's name, numbered to differ."""
    places = [Path(place) for place in list_places(data)]
    at = next(at for at, place in enumerate(places) if item.path.is_relative_to(place))
    place = places[at]
    own = item.path.relative_to(place).as_posix()
    if len(places) == 1:
        return own
    earlier = len({one for one in places[:at] if one.name == place.name} - {place})
    return f"{place.name}{f' {earlier + 1}' if earlier else ''}/{own}"


def _draw(names: Sequence[str], share: float, seed: int) -> frozenset[str]:
    # At least one; an added file changes few of the others.

    def rank(name: str) -> bytes:
        text = unicodedata.normalize("NFC", f"{seed} {name}")  # copying may change the form
        return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

    unique = sorted(set(names), key=rank)
    return frozenset(unique[: min(MAX_HELD_OUT, max(1, round(share * len(unique))))])


def _without_copies(items: Sequence[Item], held_out: Sequence[Item]) -> tuple[Item, ...]:
    """The items whose pixels are none of the held-out ones'; only files of equal sizes are read."""
    paths = [path for item in held_out for path in item.pixel_paths]
    sizes, digests = {path.stat().st_size for path in paths}, set(map(file_digest, paths))

    def is_copy(path: Path) -> bool:
        return path.stat().st_size in sizes and file_digest(path) in digests

    return tuple(item for item in items if not any(map(is_copy, item.pixel_paths)))


class DataReport(Frozen):
    """Contents of a data folder, and what is wrong with them."""

    folder: PrintableStr
    resolution_px: int = PositiveInt
    num_usable: int = NaturalInt
    epoch_size: int = NaturalInt
    num_unverified: int = NaturalInt
    """Images whose headers are fine but whose pixels were not decoded, since time ran out."""
    num_with_controls: int = NaturalInt
    problems: tuple[Problem, ...]
    buckets: tuple[workload.Bucket, ...]
    max_upscaling: float = MAX_UPSCALING
    max_crop: float = MAX_CROP
    enlarged: tuple[PrintableStr, ...]
    """Names of images enlarged by more than `max_upscaling`."""
    cropped: tuple[PrintableStr, ...]
    """Names of images that lose more than `max_crop` of their area."""
    cut_captions: tuple[PrintableStr, ...] = ()
    """Names of images whose captions are longer than the text encoder reads, with their tokens."""
    max_caption_tokens: int | None = None
    caption_words: tuple[int, int, int] | None = None
    """Minimum, median and maximum number of words in a caption, if there is any."""

    @property
    def can_train(self) -> bool:
        """Tell if `read_dataset`, and the model if one was named, would accept the folder."""
        kinds = {problem.kind for problem in self.problems}
        return self.num_usable > 0 and kinds.isdisjoint(("captionless", "model"))

    @property
    def is_clean(self) -> bool:
        """Tell if there is nothing to complain of, as a strict check asks."""
        named = self.problems or self.enlarged or self.cropped or self.cut_captions
        return self.can_train and not (named or self.num_unverified)


def check_dataset(
    data: DataPlace,
    family: Family,
    options: DatasetOptions = DEFAULT_OPTIONS,
    *,
    resolution_px: int | None = None,
    any_controls: bool = False,
    tokenizers: Path | None = None,
    on_progress: OnProgress | None = None,
) -> DataReport:
    """Check every file as training would read it, the lengths of captions, by the model's folder of
    `tokenizers` if there is one, and unless any will do, the number of control images. Raises
    InvalidInput as `scan_dataset`, and for masks that are asked for where there are none."""
    dataset = scan_dataset(data, options, on_progress)
    _require_masks(dataset, data, options)
    items, problems = dataset.items, [*dataset.problems]
    for item in () if any_controls else items:
        try:
            family.check_num_controls(len(item.control_paths), "it")
        except InvalidInput as error:
            problems.append(Problem(file=item.path.name, kind="model", message=error.message))
    resolution_px = resolution_px or family.defaults.resolution_px
    sides = family.size_multiple_px, family.max_side_px
    buckets = batches.make_buckets(items, resolution_px, *sides)
    enlarged, cropped = [], []
    for item, index in zip(items, batches.assign_buckets(items, buckets), strict=True):
        width, height = buckets[index].width_px, buckets[index].height_px
        scale = max(width / item.width_px, height / item.height_px)
        used = width * height / scale**2 / (item.width_px * item.height_px)
        if scale > MAX_UPSCALING:
            enlarged.append(item.path.name)
        if 1 - used > MAX_CROP:
            cropped.append(item.path.name)
    words = sorted(len(item.caption.split()) for item in items)
    return DataReport(
        folder=data_text(data),
        resolution_px=resolution_px,
        num_usable=len(items),
        epoch_size=dataset.epoch_size,
        num_unverified=dataset.num_unverified,
        num_with_controls=sum(bool(item.control_paths) for item in items),
        problems=tuple(problems),
        buckets=buckets,
        enlarged=tuple(enlarged),
        cropped=tuple(cropped),
        cut_captions=find_cut_captions(items, family, tokenizers),
        max_caption_tokens=caption_limit(family),
        caption_words=(words[0], words[len(words) // 2], words[-1]) if words else None,
    )
