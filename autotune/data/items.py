"""From files to training items: sizes, captions, controls and clips, each file proven readable."""

import errno
import hashlib
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.data import pixels
from autotune.data.media import CONTROLS, ByName, Captions, Media, Problem
from autotune.models.family import Family
from autotune.plan.job import ClipChoice, Crop, LossMask
from autotune.system.files import decode_text, read_bounded

QUARTERS = (3, 2, 1)  # of a clip's frames: more lengths would scatter a set
MIN_SIDE_PX = 32  # smaller images teach nothing at any resolution that these models are trained at
MASK_TOLERANCE = 0.01
MIN_RATE_SHARE = 0.95  # of the model's frame rate, under which a video is named
MAX_CAPTION_BYTES = 1 << 20  # far above what any text encoder reads
EMPTY_CAPTION = ""  # what a sample is conditioned on if its caption is dropped
JOB_FIELDS = ("shuffle_tags", "keep_tags", "seed", "crop", "flip", "loss_mask", "prior_captions")


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
    prior_captions: tuple[str, ...] = ()  # those without the trigger, if there are none

    @property
    def clip_lengths(self) -> tuple[int, ...]:
        return (self.num_frames, *self.shorter_clips)


DEFAULT_OPTIONS = DatasetOptions()


def make_options(job: Mapping[str, Any], family: Family, num_frames: int) -> DatasetOptions:
    """Make the options of a job's values, by the names of `Job`, with a model of `family`."""
    control = job.get("control")
    shorter = {family.whole_frames((num_frames - 1) * each // 4 + 1) for each in QUARTERS}
    return DatasetOptions(
        caption=job.get("caption"),
        trigger=job.get("trigger"),
        control=Path(control) if control else None,
        num_frames=num_frames,
        shorter_clips=tuple(sorted(shorter - {1, num_frames}, reverse=True)),
        frames_per_second=family.defaults.frames_per_second,
        clips=job.get("clips") or "head",
        **{name: job[name] for name in JOB_FIELDS if job.get(name) is not None},
    )


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
    # Of which the base model's prediction may be preserved; positive and negative of a slider.
    prior_captions: tuple[str, ...] = (EMPTY_CAPTION,)
    slides: int = 0  # 1 or -1: the strength of a slider that learns from it

    @property
    def captions(self) -> tuple[str, ...]:
        return (self.caption, *self.other_captions)

    @property
    def num_frames(self) -> int:
        return self.span.num_frames if self.span else max(1, len(self.pixel_paths))

    @property
    def pixel_paths(self) -> tuple[Path, ...]:
        return () if self.slides else self.frame_paths or (self.path,)


class _Unusable(Exception):
    """Why an item is left out: (kind, message)."""


@dataclass
class ItemReader:
    """Turns images, videos and clips of frames into items. Used by several threads."""

    options: DatasetOptions
    captions: Captions
    controls: ByName[tuple[Path, ...]]
    masks: ByName[Path]
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
        controls = self.controls.find(media.stem) or ()
        if options.control and not controls:
            raise _Unusable("control", f"has no control image in {options.control}")
        decode = self._has_time()
        sizes = [_read_size(media, path, decode) for path in (*frames, *controls)]
        item = self._make_item(media, *sizes[0])
        return replace(item, control_paths=controls, frame_paths=frames if media.is_clip else ())

    def _make_item(self, media: Media, width_px: int, height_px: int) -> Item:
        line, captions = self.captions.lines.find(media.name), self._make_captions(media)
        return Item(
            path=media.path,
            caption=captions[0],
            width_px=width_px,
            height_px=height_px,
            repeats=(line and line.repeats) or media.folder_repeats,
            other_captions=captions[1:],
            mask_path=self._find_mask(media, width_px / height_px),
            crop=self.options.crop,
            prior_captions=self.options.prior_captions
            or tuple(_drop_trigger(text, self.options.trigger) for text in captions),
        )

    def _find_mask(self, media: Media, aspect_ratio: float) -> Path | None:
        path = media.path
        if self.options.loss_mask == "alpha":
            if path.suffix.lower() not in pixels.IMAGE_SUFFIXES:
                return None
            with pixels.open_image(path) as image:
                return path if image.has_transparency_data else None
        mask = self.masks.find(media.stem)
        if self.options.loss_mask == "none" or mask is None:
            return None
        width, height = _read_size(media, mask, self._has_time())
        if abs(width / height / aspect_ratio - 1) > MASK_TOLERANCE:
            message = f"its mask {mask.name} of {width} x {height} px has another aspect ratio"
            raise _Unusable("mask", message)
        return mask

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
        words = (" ".join(text.split()) for text in self._read_texts(media))
        texts = [text if any(map(str.isprintable, text.replace(" ", ""))) else "" for text in words]
        if any(texts):
            self.captioned.add(media.name)
        orders = (
            order
            for text in dict.fromkeys(texts)
            for order in order_tags(text, options.shuffle_tags, options.keep_tags, options.seed)
        )
        default = " ".join((options.caption or "").split())
        return tuple(add_trigger(order or default, options.trigger) for order in orders)

    def _read_texts(self, media: Media) -> tuple[str, ...]:
        line = self.captions.lines.find(media.name)
        if line and line.captions:
            return line.captions
        file = self.captions.files.get(media.name)
        if file is None:
            return ("",)
        try:
            return (read_caption(file)[0],)
        except ValueError as error:
            raise _Unusable("broken", f"its caption {error}") from error


def read_caption(file: Path) -> tuple[str, bytes]:
    """Return a caption's text, and the bytes of its file. Raises ValueError that says why not."""
    try:
        content = read_bounded(file, MAX_CAPTION_BYTES)
        text = decode_text(content)
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 text: save it as UTF-8") from error
    if CONTROLS.search(text):
        raise ValueError(f"{file.name} holds control characters: save it as plain UTF-8 text")
    return text, content


def _read_size(media: Media, path: Path, decode: bool) -> tuple[int, int]:
    subject = "" if path == media.path else f"{path.name} "
    try:
        width, height = pixels.read_size(path, decode=decode)
    except Exception as error:  # decoders raise anything for damaged files
        where = f"{path.name}: " if subject else ""
        raise _Unusable("broken", where + pixels.explain_damage(error)) from error
    _require_side(width, height, subject)
    return width, height


def _require_side(width: int, height: int, subject: str = "") -> None:
    if min(width, height) < MIN_SIDE_PX:
        raise _Unusable("tiny", f"{subject}is {width} x {height} px, under {MIN_SIDE_PX} px")


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file's bytes, in hex. Raises OSError for what is no regular file."""
    if not path.is_file():  # a pipe might be waited for without end
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def order_tags(text: str, num_orders: int, keep: int, seed: int) -> tuple[str, ...]:
    """Order a caption's tags in up to `num_orders` ways, the written one first, `keep` in front."""
    tags = [tag.strip() for tag in text.split(",")]
    first, rest = tags[:keep], tags[keep:]
    rng, orders = random.Random(f"{seed} tags {text}"), [text]
    for _ in range(num_orders - 1 if len(rest) > 1 else 0):
        orders.append(", ".join([*first, *rng.sample(rest, len(rest))]))
    return tuple(dict.fromkeys(orders))


def add_trigger(text: str, trigger: str | None) -> str:
    """Put a trigger word in front of a caption that lacks it as a word."""
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger


def _drop_trigger(text: str, trigger: str | None) -> str:
    """Return a caption without the trigger; if there is no trigger, none of the caption."""
    if not trigger:
        return EMPTY_CAPTION
    rest = re.sub(rf"(?<!\w){re.escape(trigger)}(?!\w)", "", text)
    return ", ".join(filter(None, (" ".join(part.split()) for part in rest.split(","))))


PIECES = re.compile(r"'\w+|\w+|[^\w\s]+")  # of a text, each of which is at least one token


def find_cut_captions(
    items: Sequence[Item], family: Family, folder: Path | None
) -> tuple[str, ...]:
    """Find captions that are longer than the model reads: file names, each with its tokens. Without
    the tokenizer in the model's `folder` words are counted, so that some may be missed."""
    limit = caption_limit(family)
    texts = [max(item.captions, key=len) for item in items]
    counts = [len(PIECES.findall(text)) for text in texts]
    if folder and (folder / family.caption_tokenizer).is_dir():
        from autotune.models.latents import load_tokenizer

        with suppress(Exception):  # a damaged tokenizer raises anything, and is told elsewhere
            tokenizer = load_tokenizer(folder, family.caption_tokenizer)
            counts = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    found = zip(items, counts, strict=True)
    return tuple(f"{item.path.name} ({count})" for item, count in found if count > limit)


def tell_cut_captions(
    items: Sequence[Item], family: Family, folder: Path | None
) -> tuple[str, ...]:
    """Tell in a line, if there is need, how many captions are cut, and which first."""
    found, limit = find_cut_captions(items, family, folder), caption_limit(family)
    named = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    longer = f"captions are longer than the {limit} tokens that the text encoder reads"
    text = f"{len(found)} of {len(items)} {longer}, and cut there: {named}"
    return (text,) if found else ()


def caption_limit(family: Family) -> int:
    """Return how many tokens of a caption the text encoder reads."""
    return family.max_caption_tokens or family.max_text_tokens
