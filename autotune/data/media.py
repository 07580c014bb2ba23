"""Files of a data folder: media, captions, metadata, masks, and all else that people expect to be
read, which is named instead of ignored."""

import csv
import io
import json
import os
import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator

from autotune.data import pixels
from autotune.errors import InvalidInput
from autotune.plan.base import Frozen
from autotune.plan.file import RUN_PLAN_FILE
from autotune.system.files import read_bounded

OTHER_VIDEOS = {".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".mts", ".m2ts", ".m4v", ".3gp", ".ogv"}
OTHER_IMAGES = {".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl"}
MASK_SUFFIX = ".mask.png"
REPEATS = re.compile(r"(\d{1,3})_.+")  # kohya's folder that is so often in an epoch: `10_dog`
CAPTION_SUFFIXES = (".txt", ".caption")
METADATA = "metadata.jsonl"
METADATA_FILES = (METADATA, "metadata.csv")
OTHER_TEXTS = {".json", ".jsonl", ".csv", ".tsv", ".parquet"}  # that often hold captions
TEXTS_OF_ONE = {".cap", ".md", ".prompt", ".tag", ".tags", ".text", ".xml", ".yaml", ".yml"}
"""Endings of what looks like a caption if there is an image of that name."""
CONTROLS = re.compile(r"[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")  # that are no white space
MAX_REPEATS = 1000
MAX_CAPTIONS = 100
MAX_METADATA_BYTES = 64 << 20

LeftOut = Literal["broken", "tiny", "duplicate", "captionless", "control", "short", "mask"]
ProblemKind = Literal[
    LeftOut, "model", "metadata", "unsupported", "unread", "link", "run", "variable", "black"
]
REMARKS = frozenset({"variable", "black"})
PrintableStr = Annotated[
    str, BeforeValidator(lambda text: str(text).encode("utf-8", "backslashreplace").decode())
]


class Problem(Frozen):
    """One file that is left out or needs attention."""

    file: PrintableStr
    kind: ProblemKind
    message: PrintableStr


T = TypeVar("T")


@dataclass(frozen=True)
class ByName(Generic[T]):
    """Values by file name, which need not match in case or Unicode form: both change on copying."""

    exact: Mapping[str, T]

    @cached_property
    def _folded(self) -> dict[str, T]:
        return {fold_name(name): value for name, value in self.exact.items()}

    def find(self, name: str) -> T | None:
        return self.exact.get(name, self._folded.get(fold_name(name)))


def fold_name(name: str) -> str:
    """Fold a file name's case and Unicode form, so that equal names compare equal."""
    return unicodedata.normalize("NFC", name).casefold()


@dataclass(frozen=True)
class Contents:
    """The files below a folder, sorted by name, and those that are not read."""

    folder: Path
    files: tuple[Path, ...]
    problems: tuple[Problem, ...]

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def list_contents(folder: Path, *, exclude: Path | None = None) -> Contents:
    """List the files below `folder` that are not hidden, below `exclude` or in the output
    folder of a run. Links to folders are named, and so are texts that are links to elsewhere:
    untrusted data could otherwise send a file of this machine away as a prompt."""
    files: list[Path] = []
    problems: list[Problem] = []

    def leave_out(path: Path, kind: ProblemKind, message: str) -> None:
        name = path.relative_to(folder).as_posix()
        problems.append(Problem(file=name, kind=kind, message=message))

    def report(error: OSError) -> None:
        leave_out(Path(error.filename), "broken", f"cannot be read: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=report):
        parent = Path(place)
        if RUN_PLAN_FILE in names and parent != folder:
            leave_out(parent, "run", "the output folder of a run, not data")
            folders.clear()
            continue
        shown = (parent / name for name in folders if not name.startswith("."))
        inside = [path for path in shown if path != exclude]
        folders[:] = [path.name for path in inside]
        for path in filter(os.path.islink, inside):
            if _leads_out(path, [folder]):
                add = f"--data {shlex.quote(str(path))}"
                leave_out(path, "link", f"a link to a folder is not followed: name it, too: {add}")
        files += [parent / name for name in names if not name.startswith(".")]
    texts = {*CAPTION_SUFFIXES, *OTHER_TEXTS}
    links = [path for path in files if path.suffix.lower() in texts and path.is_symlink()]
    if links:  # in the cache of Hugging Face texts and images are links to one folder
        others = set(files) - set(links)
        trusted = {folder, *(Path(os.path.realpath(path)).parent for path in others)}
        distrusted = {path for path in links if _leads_out(path, trusted)}
        for path in sorted(distrusted):
            leave_out(path, "link", "a text that is a link to elsewhere is not read: copy it")
        files = [path for path in files if path not in distrusted]
    ordered = sorted(files, key=lambda path: path.relative_to(folder).as_posix())
    return Contents(folder, tuple(ordered), tuple(problems))


def _leads_out(link: Path, places: Iterable[Path]) -> bool:
    real = Path(os.path.realpath(link))
    return not any(real.is_relative_to(os.path.realpath(place)) for place in places)


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
        """Times that it is shown per epoch, if the name of a folder above it tells."""
        matches = (REPEATS.fullmatch(parent.name) for parent in Path(self.name).parents)
        return max(1, next((int(match[1]) for match in matches if match), 1))


def find_media(contents: Contents, *, clips: bool) -> tuple[Media, ...]:
    """Find the images of a folder, sorted by name; with `clips` videos and frames, too."""
    suffixes, folder = _readable_suffixes(clips=clips), contents.folder
    frames: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in contents.files:
        if path.suffix.lower() not in suffixes or _is_mask(path):
            continue
        if clips and path.parent != folder and path.suffix.lower() in pixels.IMAGE_SUFFIXES:
            frames[path.parent].append(path)
        else:
            frames[path] = [path]
    found = []
    for path, own in frames.items():
        ordered = tuple(sorted(own, key=_natural_sort_key))
        found.append(Media(contents.name(path), path, ordered))
    return tuple(sorted(found, key=lambda one: one.name))


def _readable_suffixes(*, clips: bool) -> frozenset[str]:
    if not clips:
        return pixels.IMAGE_SUFFIXES
    videos = pixels.VIDEO_SUFFIXES if pixels.has_video_decoder() else frozenset[str]()
    return pixels.IMAGE_SUFFIXES | pixels.ANIMATION_SUFFIXES | videos


def _is_mask(path: Path) -> bool:
    return path.name.lower().endswith(MASK_SUFFIX)


def _natural_sort_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    parts = re.split(r"(\d+)", path.name)
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in parts)


def find_unsupported(contents: Contents, *, clips: bool) -> Iterator[Problem]:
    """Find media files that are not read, with what to do about each."""
    known = pixels.VIDEO_SUFFIXES | OTHER_VIDEOS | OTHER_IMAGES
    suffixes = known - _readable_suffixes(clips=clips)
    for path in contents.files:
        if path.suffix.lower() in suffixes:
            message = _explain_unsupported(path, clips=clips)
            yield Problem(file=contents.name(path), kind="unsupported", message=message)


def _explain_unsupported(path: Path, *, clips: bool) -> str:
    if path.suffix.lower() not in pixels.VIDEO_SUFFIXES | OTHER_VIDEOS:
        converts = f"magick {shlex.quote(str(path))} {shlex.quote(str(path.with_suffix('.png')))}"
        return f"its format is not supported, png is: {converts}"
    if not clips:
        return "only models that make clips train on videos, with --frames above 1"
    file, frames = shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")))
    if pixels.has_video_decoder():
        return f"its format is not supported, mp4 is: ffmpeg -i {file} {frames}.mp4"
    as_frames = f"mkdir {frames} && ffmpeg -i {file} {frames}/%05d.png"
    if path.suffix.lower() in OTHER_VIDEOS:
        return f"its format is not supported, a folder of frames is: {as_frames}"
    install = "pip install 'lora-autotune[video]'"
    return f"videos are read with PyAV, or as folders of frames: {install}, or {as_frames}"


def find_masks(contents: Contents) -> dict[str, Path]:
    """Find masks, by the stem of what they belong to."""
    masks = filter(_is_mask, contents.files)
    return {contents.name(path)[: -len(MASK_SUFFIX)]: path for path in masks}


def find_controls(contents: Contents) -> ByName[tuple[Path, ...]]:
    """Find control images, by stem: `NAME.*`, or else all of `NAME_1.*`, `NAME_2.*` and so on."""
    single = {one.stem: one.path for one in find_media(contents, clips=False)}
    numbered: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for stem, path in single.items():
        if match := re.fullmatch(r"(.+)_(\d+)", stem):
            numbered[match[1]][int(match[2])] = path
    complete = {
        stem: tuple(paths[number] for number in sorted(paths))
        for stem, paths in numbered.items()
        if sorted(paths) == list(range(1, len(paths) + 1))
    }
    return ByName(complete | {stem: (path,) for stem, path in single.items()})


class MetadataLine(NamedTuple):
    """Captions and repeats of a file in metadata; None and () leave them to its name."""

    captions: tuple[str, ...]
    repeats: int | None


@dataclass(frozen=True)
class Captions:
    """The texts of media, by their names: a line of metadata, else a file of the same name."""

    lines: ByName[MetadataLine]
    files: Mapping[str, Path]
    problems: tuple[Problem, ...]


def find_captions(contents: Contents, media: Iterable[Media]) -> Captions:
    """Find captions in all forms that are read, and name other files that look like captions."""
    media = tuple(media)
    lines, problems = _read_metadata(contents, {fold_name(one.name) for one in media})
    texts = ByName({contents.name(path): path for path in contents.files if _is_caption(path)})
    files = {}
    for one in media:
        names = (f"{of}{end}" for of in (one.stem, one.name) for end in CAPTION_SUFFIXES)
        if path := next(filter(None, map(texts.find, names)), None):
            files[one.name] = path
    captioned = {
        fold_name(name)
        for one in media
        if one.name in files or ((line := lines.find(one.name)) and line.captions)
        for name in (one.stem, one.name)
    }
    used, clips = set(files.values()), {one.path for one in media if one.is_clip}
    named = {fold_name(one.stem) for one in media}
    forms = f"captions are read from NAME.txt, NAME.caption and {' or '.join(METADATA_FILES)}"
    for path in contents.files:
        name, is_caption = contents.name(path), _is_caption(path)
        of, ending = fold_name(name.removesuffix(path.suffix)), path.suffix.lower()
        is_other = ending in OTHER_TEXTS and path.name.lower() not in METADATA_FILES
        is_other = is_other or (ending in TEXTS_OF_ONE and of in named)
        if (is_caption or is_other) and path not in used and of not in captioned:
            message = "there is no image of this name" if is_caption else forms
            if path.parent in clips:
                message = f"a clip's caption is next to its folder: {path.parent.name}.txt"
            problems.append(Problem(file=name, kind="unread", message=message))
    return Captions(lines, files, tuple(problems))


def _is_caption(path: Path) -> bool:
    return path.suffix.lower() in CAPTION_SUFFIXES


def _read_metadata(
    contents: Contents, names: set[str]
) -> tuple[ByName[MetadataLine], list[Problem]]:
    """Read the lines of metadata by file name. The layout is that of Hugging Face's imagefolder
    (`file_name`, `text`; names are below the file's folder); `repeats` is our own."""
    lines: dict[str, MetadataLine] = {}
    problems: list[Problem] = []
    rows: Sequence[bytes | dict[str, Any]]
    for path in contents.files:
        if path.name.lower() not in METADATA_FILES:
            continue
        own, below, complaints = contents.name(path), contents.name(path.parent), []
        try:
            content = read_bounded(path, MAX_METADATA_BYTES).removeprefix(b"\xef\xbb\xbf")
            rows = _read_rows(content) if path.suffix.lower() == ".csv" else content.split(b"\n")
        except OSError as error:
            rows, complaints = [], [f"cannot be read: {error.strerror}"]
        except (ValueError, csv.Error) as error:
            rows, complaints = [], [f"cannot be read as CSV in UTF-8: {error}"]
        for number, row in enumerate(rows, start=1):
            if not row.strip() if isinstance(row, bytes) else not row:
                continue
            try:
                name, line = _parse_line(row)
            except ValueError as error:
                complaints.append(f"line {number}: {error}")
                continue
            name = name if below == "." else f"{below}/{name}"
            if name in lines:
                complaints.append(f"line {number}: {name} has a line already")
            elif fold_name(name) not in names:
                complaints.append(f"no image {name}")
            lines.setdefault(name, line)
        problems += [Problem(file=own, kind="metadata", message=told) for told in complaints]
    return ByName(lines), problems


def _read_rows(content: bytes) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
    if "file_name" not in (reader.fieldnames or ()):
        raise ValueError("it has no column `file_name`")
    rows: list[dict[str, Any]] = [{}, *reader]  # the first line names the columns
    for row in rows:
        if not row.get("repeats"):
            row.pop("repeats", None)
        elif row["repeats"].isdecimal():
            row["repeats"] = int(row["repeats"])
    return rows


def _parse_line(row: bytes | dict[str, Any]) -> tuple[str, MetadataLine]:
    try:
        entry = json.loads(row) if isinstance(row, bytes) else row
        # Half a surrogate pair, as in "\ud83d", is JSON but not text.
        json.dumps(entry, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON, or not UTF-8") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise ValueError("no `file_name`")
    text, repeats = entry.get("text"), entry.get("repeats")
    texts: list[Any] = text if isinstance(text, list) and 0 < len(text) <= MAX_CAPTIONS else [text]
    if text is None and "repeats" in entry:
        texts = []
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("no `text`")
    if any(map(CONTROLS.search, texts)):
        raise ValueError("`text` holds control characters")
    if "repeats" in entry and (type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS):
        raise ValueError(f"`repeats` is not a whole number from 1 to {MAX_REPEATS}")
    return entry["file_name"].removeprefix("./"), MetadataLine(tuple(texts), repeats)


def locate_control(folder: Path, control: Path) -> Path:
    """Spell the control folder below the data folder if it lies there: it holds no data."""
    data, inside = Path(os.path.realpath(folder)), Path(os.path.realpath(control))
    if data.is_relative_to(inside):
        what = f"the control folder {control} holds the data folder {folder}"
        raise InvalidInput(what, hint="put control images into a folder of their own")
    return folder / inside.relative_to(data) if inside.is_relative_to(data) else control
