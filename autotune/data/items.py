"""From files to training items: sizes, captions, controls and clips, each file proven readable."""

import errno
import hashlib
import json
import os
import random
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from autotune.data import pixels
from autotune.models.family import Family
from autotune.plan.base import Frozen
from autotune.plan.file import RUN_PLAN_FILE
from autotune.plan.job import ClipChoice, Crop, LossMask
from autotune.system.files import read_bounded

OTHER_VIDEOS = {".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".mts", ".m2ts", ".m4v", ".3gp", ".ogv"}
# Files that people expect to be read: those that are not are named instead of ignored.
OTHER_IMAGES = {".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl"}
MASK_SUFFIX = ".mask.png"
REPEATS = re.compile(r"(\d{1,3})_.+")  # kohya's folder that is so often in an epoch: `10_dog`
QUARTERS = (3, 2, 1)  # of a clip's frames: more lengths would scatter a set
MIN_SIDE_PX = 32  # smaller images teach nothing at any resolution that these models are trained at
MASK_TOLERANCE = 0.01
MIN_RATE_SHARE = 0.95  # of the model's frame rate, under which a video is named
METADATA = "metadata.jsonl"
MAX_REPEATS = 1000
MAX_CAPTIONS = 100
MAX_METADATA_BYTES = 64 << 20
MAX_CAPTION_BYTES = 1 << 20  # far above what any text encoder reads
EMPTY_CAPTION = ""  # what a sample is conditioned on if its caption is dropped
COPIED_FIELDS = ("shuffle_tags", "keep_tags", "seed", "crop", "flip", "loss_mask")  # of a job


@dataclass(frozen=True)
class DatasetOptions:
    """Settings by which the files of a data folder become training items."""

    caption: str | None = None
    trigger: str | None = None  # word put in front of every caption that lacks it
    control: Path | None = None
    """Folder of control images, by the same stems: `NAME.*`, or `NAME_1.*`, `NAME_2.*` ..."""
    num_frames: int = 1  # above 1, videos and subfolders of images are clips of up to so many
    shorter_clips: tuple[int, ...] = ()  # frames of clips that are too short for `num_frames`
    frames_per_second: float = 24.0
    clips: ClipChoice = "head"
    shuffle_tags: int = 0  # orders of a caption's tags; 0 or 1 for the written one alone
    keep_tags: int = 0
    seed: int = 0
    crop: Crop = "center"
    flip: bool = False
    loss_mask: LossMask = "none"

    @property
    def clip_lengths(self) -> tuple[int, ...]:
        return (self.num_frames, *self.shorter_clips)


DEFAULT_OPTIONS = DatasetOptions()


def make_options(job: Mapping[str, Any], family: Family, num_frames: int) -> DatasetOptions:
    """Make the options of a job's values, by the names of `Job`, with a model of `family`."""
    control, per_latent = job.get("control"), family.frames_per_latent
    latents = (num_frames - 1) // per_latent  # after the first
    shorter = {latents * quarters // 4 * per_latent + 1 for quarters in QUARTERS}
    return DatasetOptions(
        caption=job.get("caption"),
        trigger=job.get("trigger"),
        control=Path(control) if control else None,
        num_frames=num_frames,
        shorter_clips=tuple(sorted(shorter - {1, num_frames}, reverse=True)),
        frames_per_second=family.defaults.frames_per_second,
        clips=job.get("clips") or "head",
        **{name: job[name] for name in COPIED_FIELDS if job.get(name) is not None},
    )


LeftOut = Literal["broken", "tiny", "duplicate", "captionless", "control", "short", "mask"]
ProblemKind = Literal[LeftOut, "metadata", "unsupported", "run", "variable", "black"]
REMARKS = frozenset({"variable", "black"})
PrintableStr = Annotated[
    str, BeforeValidator(lambda text: str(text).encode("utf-8", "backslashreplace").decode())
]


class Problem(Frozen):
    """One file that is left out or needs attention."""

    file: PrintableStr
    kind: ProblemKind
    message: PrintableStr


class MetadataLine(NamedTuple):
    """Captions and repeats of a file in `metadata.jsonl`; None and () leave them to its name."""

    captions: tuple[str, ...]
    repeats: int | None


@dataclass(frozen=True)
class Item:
    """One training image, or one clip: of a video, or of frames that lie in a folder."""

    path: Path
    caption: str
    width_px: int
    height_px: int
    control_paths: tuple[Path, ...] = ()
    repeats: int = 1
    frame_paths: tuple[Path, ...] = ()  # of a clip in order; empty for an image or a video
    span: pixels.ClipSpan | None = None
    other_captions: tuple[str, ...] = ()
    mask_path: Path | None = None  # its brightness, or the image's own alpha, weighs the loss
    crop: Crop = "center"
    weight: float = 1.0

    @property
    def captions(self) -> tuple[str, ...]:
        return (self.caption, *self.other_captions)

    @property
    def num_frames(self) -> int:
        return self.span.num_frames if self.span else len(self.pixel_paths)

    @property
    def pixel_paths(self) -> tuple[Path, ...]:
        return self.frame_paths or (self.path,)


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


def find_media(folder: Path, *, clips: bool, exclude: Path | None = None) -> tuple[Media, ...]:
    """Find the images below `folder`, sorted by name; with `clips` videos and frames, too. What is
    hidden, below `exclude` or in the output folder of a run is ignored."""
    suffixes = _readable_suffixes(clips=clips)
    files = (path for path in _list_files(folder, exclude) if not path.name.endswith(MASK_SUFFIX))
    paths = [path for path in files if path.suffix.lower() in suffixes]
    frames: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        if clips and path.parent != folder and path.suffix.lower() in pixels.IMAGE_SUFFIXES:
            frames[path.parent].append(path)
        else:
            frames[path] = [path]
    found = []
    for path, own in frames.items():
        ordered = tuple(sorted(own, key=_natural_sort_key))
        found.append(Media(path.relative_to(folder).as_posix(), path, ordered))
    return tuple(sorted(found, key=lambda one: one.name))


def _readable_suffixes(*, clips: bool) -> frozenset[str]:
    videos = pixels.VIDEO_SUFFIXES if pixels.has_video_decoder() else frozenset[str]()
    return (
        pixels.IMAGE_SUFFIXES | pixels.ANIMATION_SUFFIXES | videos
        if clips
        else pixels.IMAGE_SUFFIXES
    )


def find_unsupported(folder: Path, *, clips: bool, exclude: Path | None = None) -> dict[str, str]:
    """Find media files that are not read, by name, with what to do about each."""
    suffixes = (pixels.VIDEO_SUFFIXES | OTHER_VIDEOS | OTHER_IMAGES) - _readable_suffixes(
        clips=clips
    )
    found = {}
    for path in _list_files(folder, exclude):
        if path.suffix.lower() in suffixes:
            found[path.relative_to(folder).as_posix()] = _explain_unsupported(path, clips=clips)
    return found


def _explain_unsupported(path: Path, *, clips: bool) -> str:
    if path.suffix.lower() not in pixels.VIDEO_SUFFIXES | OTHER_VIDEOS:
        return "its format is not supported: convert it to png, jpeg or webp"
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


class _Unusable(Exception):
    """Why an item is left out: (kind, message)."""


@dataclass
class ItemReader:
    """Turns images, videos and clips of frames into items. Used by several threads."""

    options: DatasetOptions
    metadata: Mapping[str, MetadataLine]
    controls: Mapping[str, Path]
    masks: Mapping[str, Path]
    deadline: float  # monotonic time after which pixels are no longer decoded
    num_unverified: int = 0
    captioned: set[str] = field(default_factory=set)

    def read(self, media: Media) -> list[Item | Problem]:
        try:
            found = self._read_video(media) if self._is_video(media) else [self._read(media)]
            return [*found, *self._find_black_mask(media, found)]
        except _Unusable as error:
            kind, message = error.args
            return [Problem(file=media.name, kind=kind, message=message)]

    def _is_video(self, media: Media) -> bool:
        if self.options.num_frames == 1 or media.is_clip:
            return False
        suffix = media.path.suffix.lower()
        return suffix in pixels.VIDEO_SUFFIXES or (
            suffix in pixels.ANIMATION_SUFFIXES and pixels.is_animation(media.path)
        )

    def _read_video(self, media: Media) -> list[Item | Problem]:
        options = self.options
        try:
            facts = pixels.read_facts(media.path)
            spans = pixels.choose_spans(
                facts, options.clips, options.clip_lengths, options.frames_per_second
            )
            for span in spans:
                if not self._has_time():
                    break
                for _ in pixels.read_clip(media.path, span):  # damage raises
                    pass
        except Exception as error:  # decoders raise anything for damaged files
            raise _Unusable("broken", pixels.explain_damage(error)) from error
        _require_side(facts.width_px, facts.height_px)
        if not spans:
            lasts = f"lasts {facts.duration_seconds:.2f} s"
            needed = min(options.clip_lengths) / options.frames_per_second
            raise _Unusable("short", f"{lasts}, {needed:.2f} s are needed")
        item = self._make_item(media, facts.width_px, facts.height_px)
        found: list[Item | Problem] = [replace(item, span=span) for span in spans]
        rate = f"at {options.frames_per_second:g} a second some are"
        message = None
        if facts.is_variable:
            message = f"its frames are not evenly spaced: {rate} repeated or left out"
        elif facts.frames_per_second < MIN_RATE_SHARE * options.frames_per_second:
            message = f"it has {facts.frames_per_second:.3g} frames a second: {rate} repeated"
        if message:
            found.append(Problem(file=media.name, kind="variable", message=message))
        return found

    def _has_time(self) -> bool:
        has_time = time.monotonic() < self.deadline
        self.num_unverified += not has_time
        return has_time

    def _read(self, media: Media) -> Item:
        options, frames = self.options, media.frame_paths
        if media.is_clip:
            lengths = [length for length in options.clip_lengths if length <= len(frames)]
            if not lengths:
                needed = min(options.clip_lengths)
                raise _Unusable("short", f"has {len(frames)} frames, {needed} are needed")
            frames = frames[: max(lengths)]
        controls = match_controls(media, self.controls)
        if options.control and not controls:
            raise _Unusable("control", f"has no control image in {options.control}")
        decode = self._has_time()
        sizes = [_read_size(media, path, decode) for path in (*frames, *controls)]
        item = self._make_item(media, *sizes[0])
        return replace(item, control_paths=controls, frame_paths=frames if media.is_clip else ())

    def _make_item(self, media: Media, width_px: int, height_px: int) -> Item:
        line, captions = self.metadata.get(media.name), self._make_captions(media)
        return Item(
            path=media.path,
            caption=captions[0],
            width_px=width_px,
            height_px=height_px,
            repeats=(line and line.repeats) or media.folder_repeats,
            other_captions=captions[1:],
            mask_path=self._find_mask(media, width_px / height_px),
            crop=self.options.crop,
        )

    def _find_mask(self, media: Media, aspect_ratio: float) -> Path | None:
        path = media.path
        if self.options.loss_mask == "alpha":
            is_image = path.suffix.lower() in pixels.IMAGE_SUFFIXES
            return path if is_image and _has_alpha(path) else None
        if self.options.loss_mask == "none" or media.stem not in self.masks:
            return None
        path = self.masks[media.stem]
        width, height = _read_size(media, path, self._has_time())
        if abs(width / height / aspect_ratio - 1) > MASK_TOLERANCE:
            message = f"its mask {path.name} of {width} x {height} px has another aspect ratio"
            raise _Unusable("mask", message)
        return path

    def _find_black_mask(self, media: Media, found: Sequence[Item | Problem]) -> list[Problem]:
        path = next((one.mask_path for one in found if isinstance(one, Item)), None)
        if path is None or time.monotonic() > self.deadline:
            return []
        try:
            if not pixels.is_black_mask(path, is_alpha=path == media.path):
                return []
        except Exception:  # damage shows elsewhere
            return []
        what = f"its mask {path.name} is black everywhere"
        if path == media.path:
            what = "it is transparent everywhere"
        message = f"{what}: nothing of it is trained, but for `mask_floor`"
        return [Problem(file=media.name, kind="black", message=message)]

    def _make_captions(self, media: Media) -> tuple[str, ...]:
        options = self.options
        texts = [" ".join(text.split()) for text in self._read_texts(media)]
        if any(texts):
            self.captioned.add(media.name)
        orders = (
            order
            for text in dict.fromkeys(texts)
            for order in order_tags(text, options.shuffle_tags, options.keep_tags, options.seed)
        )
        default = " ".join((options.caption or "").split())
        return tuple(_add_trigger(order or default, options.trigger) for order in orders)

    def _read_texts(self, media: Media) -> tuple[str, ...]:
        line = self.metadata.get(media.name)
        if line and line.captions:
            return line.captions
        file = media.path.parent / f"{Path(media.stem).name}.txt"
        if not os.path.lexists(file):
            return ("",)
        try:
            return (read_bounded(file, MAX_CAPTION_BYTES).decode("utf-8-sig"),)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise _Unusable("broken", f"its caption {file.name} {reason}") from error
        except UnicodeDecodeError as error:
            message = f"its caption {file.name} is not UTF-8 text"
            raise _Unusable("broken", message) from error


def _read_size(media: Media, path: Path, decode: bool) -> tuple[int, int]:
    subject = "" if path == media.path else f"{path.name} "
    try:
        width, height = pixels.read_size(path, decode=decode)
    except Exception as error:  # decoders raise anything for damaged files
        where = f"{path.name}: " if subject else ""
        raise _Unusable("broken", where + pixels.explain_damage(error)) from error
    _require_side(width, height, subject)
    return width, height


def _has_alpha(path: Path) -> bool:
    with pixels.open_image(path) as image:
        return image.has_transparency_data


def _require_side(width: int, height: int, subject: str = "") -> None:
    if min(width, height) < MIN_SIDE_PX:
        raise _Unusable("tiny", f"{subject}is {width} x {height} px, under {MIN_SIDE_PX} px")


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file's bytes, in hex. Raises OSError for what is no regular file."""
    if not path.is_file():  # a pipe might be waited for without end
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_metadata(folder: Path) -> tuple[Mapping[str, MetadataLine], tuple[str, ...]]:
    """Read `metadata.jsonl`: its lines by file name, and what is wrong with the others. The layout
    is that of Hugging Face's imagefolder (`file_name`, `text`); `repeats` is our own."""
    lines: dict[str, MetadataLine] = {}
    problems: list[str] = []
    try:
        content = read_bounded(folder / METADATA, MAX_METADATA_BYTES)
    except FileNotFoundError:
        return {}, ()
    except OSError as error:
        return {}, (f"cannot be read: {error.strerror}",)
    raw_lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, raw in enumerate(raw_lines, start=1):
        if not raw.strip():
            continue
        try:
            name, line = _parse_line(raw)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if name in lines:
            problems.append(f"line {number}: {name} has a line already")
        lines.setdefault(name, line)
    return lines, tuple(problems)


def _parse_line(raw: bytes) -> tuple[str, MetadataLine]:
    try:
        entry = json.loads(raw)
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
    if "repeats" in entry and (type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS):
        raise ValueError(f"`repeats` is not a whole number from 1 to {MAX_REPEATS}")
    return entry["file_name"].removeprefix("./"), MetadataLine(tuple(texts), repeats)


def order_tags(text: str, num_orders: int, keep: int, seed: int) -> tuple[str, ...]:
    """Order a caption's tags in up to `num_orders` ways, the written one first, `keep` in front."""
    tags = [tag.strip() for tag in text.split(",")]
    first, rest = tags[:keep], tags[keep:]
    rng, orders = random.Random(f"{seed} tags {text}"), [text]
    for _ in range(num_orders - 1 if len(rest) > 1 else 0):
        orders.append(", ".join([*first, *rng.sample(rest, len(rest))]))
    return tuple(dict.fromkeys(orders))


def _add_trigger(text: str, trigger: str | None) -> str:
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger
