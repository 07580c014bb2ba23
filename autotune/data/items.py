"""From files to training items: sizes, captions, control images and clips, each file proven readable."""

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from autotune.data.captions import MetadataLine, UnreadableCaption, complete_caption, read_caption
from autotune.data.files import ANIMATION_SUFFIXES, VIDEO_SUFFIXES, Media, match_controls
from autotune.data.options import DatasetOptions
from autotune.data.pixels import read_size
from autotune.data.video import ClipSpan, VideoFacts, choose_spans, is_animation, read_clip, read_facts
from autotune.schema import Frozen

MIN_SIDE_PX = 32
"""Smaller images teach nothing at any resolution that these models are trained at."""

ProblemKind = Literal[
    "broken", "tiny", "duplicate", "captionless", "control", "metadata", "unsupported", "short", "run", "variable"
]
REMARKS = frozenset({"variable"})
"""Kinds of problems for which nothing is left out."""
PrintableStr = Annotated[str, BeforeValidator(lambda text: str(text).encode("utf-8", "backslashreplace").decode())]
"""Text for people; a file name in it may hold bytes that are not UTF-8."""


class Problem(Frozen):
    """One file that is left out or needs attention."""

    file: PrintableStr
    """Path below the data folder."""
    kind: ProblemKind
    message: PrintableStr


@dataclass(frozen=True)
class Item:
    """One training image, or one clip: of a video, or of frames that lie in a folder."""

    path: Path
    caption: str
    width_px: int
    height_px: int
    control_paths: tuple[Path, ...] = ()
    repeats: int = 1
    """Number of times that it is seen per epoch."""
    frame_paths: tuple[Path, ...] = ()
    """The frames of a clip in order; empty for an image or a video."""
    span: ClipSpan | None = None
    """The part of a video; None for images."""

    @property
    def num_frames(self) -> int:
        return self.span.num_frames if self.span else len(self.pixel_paths)

    @property
    def pixel_paths(self) -> tuple[Path, ...]:
        """The files that hold its pixels, in order."""
        return self.frame_paths or (self.path,)


class _Unusable(Exception):
    """Why an item is left out: (kind, message)."""


@dataclass
class ItemReader:
    """Turns images, videos and clips of frames into items. Used by several threads."""

    options: DatasetOptions
    metadata: Mapping[str, MetadataLine]
    controls: Mapping[str, Path]
    """Control images by stem."""
    deadline: float
    """Monotonic time after which pixels are no longer decoded."""
    num_unverified: int = 0
    captioned: set[str] = field(default_factory=set)
    """Names of what has a caption of its own."""

    def read(self, media: Media) -> list[Item | Problem]:
        """The items of one image, clip or video, or why there is none."""
        try:
            return self._read_video(media) if self._is_video(media) else [self._read(media)]
        except _Unusable as error:
            kind, message = error.args
            return [Problem(file=media.name, kind=kind, message=message)]

    def _is_video(self, media: Media) -> bool:
        suffix = media.path.suffix.lower()
        if self.options.num_frames == 1 or media.is_clip:
            return False
        return suffix in VIDEO_SUFFIXES or (suffix in ANIMATION_SUFFIXES and is_animation(media.path))

    def _read_video(self, media: Media) -> list[Item | Problem]:
        options = self.options
        try:
            facts = read_facts(media.path)
            spans = choose_spans(facts, options.clips, options.clip_lengths, options.frames_per_second)
            self._verify(media.path, spans)
        except Exception as error:  # decoders raise anything for damaged files
            raise _Unusable("broken", f"cannot be decoded: {_reason(error, media.path)}") from error
        _require_side(facts.width_px, facts.height_px)
        if not spans:
            lasts = f"lasts {facts.duration_seconds:.2f} s"
            needed = min(options.clip_lengths) / options.frames_per_second
            raise _Unusable("short", f"{lasts}, {needed:.2f} s are needed")
        line = self.metadata.get(media.name)
        caption, repeats = self._read_caption(media), (line and line.repeats) or media.folder_repeats
        size = facts.width_px, facts.height_px
        items: list[Item | Problem] = [Item(media.path, caption, *size, repeats=repeats, span=span) for span in spans]
        return [*items, *self._remarks(media, facts)]

    def _remarks(self, media: Media, facts: VideoFacts) -> list[Problem]:
        if not facts.is_variable:
            return []
        rate = f"{self.options.frames_per_second:g} a second"
        message = f"its frames are not evenly spaced: at {rate} some are repeated or left out"
        return [Problem(file=media.name, kind="variable", message=message)]

    def _verify(self, path: Path, spans: tuple[ClipSpan, ...]) -> None:
        """Decode the clips, as long as there is time."""
        for span in spans:
            if not self._has_time():
                return
            for _ in read_clip(path, span):
                pass

    def _has_time(self) -> bool:
        has_time = time.monotonic() < self.deadline
        self.num_unverified += not has_time
        return has_time

    def _read(self, media: Media) -> Item:
        number = max((one for one in self.options.clip_lengths if one <= len(media.frame_paths)), default=0)
        if media.is_clip and not number:
            needed = min(self.options.clip_lengths)
            raise _Unusable("short", f"has {len(media.frame_paths)} frames, {needed} are needed")
        frames = media.frame_paths[:number] if media.is_clip else media.frame_paths
        controls = match_controls(media, self.controls)
        if self.options.control and not controls:
            raise _Unusable("control", f"has no control image in {self.options.control}")
        decode = self._has_time()
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
        raise _Unusable("broken", f"{subject}cannot be decoded: {_reason(error, path)}") from error
    _require_side(width, height, subject)
    return width, height


def _require_side(width: int, height: int, subject: str = "") -> None:
    if min(width, height) < MIN_SIDE_PX:
        raise _Unusable("tiny", f"{subject}is {width} x {height} px, under {MIN_SIDE_PX} px")


def _reason(error: Exception, path: Path) -> str:
    return getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex.

    Raises:
        OSError: it cannot be read or is not a regular file, such as a pipe that might be waited for without end.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
