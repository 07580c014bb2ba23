"""Video files and animations: what a file holds, which clips are taken of it, and a clip's frames,
one at a time.

Containers are decoded by PyAV (ffmpeg), animated gif and webp by Pillow. No more than one decoded
frame is held, and nothing outside of the file is opened, whatever a file asks for.
"""

import math
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from autotune.data.media import ANIMATION_SUFFIXES
from autotune.data.pixels import MAX_PIXELS, open_image, to_rgb
from autotune.plan.job import ClipChoice

DEMUXERS = "mov,matroska,avi"
"""ffmpeg's readers of the formats that are offered; some of its others follow addresses that a
file names."""
MAX_SOURCE_FRAMES = 1 << 20
"""Frames of a file: five hours at 60 a second."""
MAX_ANIMATION_PIXELS = 1 << 32
"""Maximum pixels of all frames together: 2,000 frames of 1080p. Pillow decodes them all for
their times."""
MAX_SOURCE_FPS = 1000.0
MIN_SOURCE_FPS = 0.5
MAX_CLIPS = 64
"""Clips of one file."""
VARIABLE_SHARE = 0.5
"""Frames this much closer or farther apart than usual, as a share of it, make a variable rate."""
DECODER_THREADS = 4
"""Each holds frames of its own."""
DEFAULT_DELAY_SECONDS = 0.1
"""How long browsers show a frame that names 10 ms or less."""


@dataclass(frozen=True)
class ClipSpan:
    """The part of a video that is one training item, at the model's rate."""

    start_seconds: float
    """Time of its first frame, on the file's own clock."""
    num_frames: int
    frames_per_second: float


@dataclass(frozen=True)
class VideoFacts:
    """What a video file holds. Sizes are those of the frames as they are shown."""

    width_px: int
    height_px: int
    start_seconds: float
    duration_seconds: float
    is_variable: bool
    """Whether frames are not evenly spaced."""


@dataclass(frozen=True)
class _Frame:
    seconds: float
    duration_seconds: float
    picture: Any
    """Pillow's image, or PyAV's frame, which is converted only if it is used."""

    def to_rgb(self) -> Image.Image:
        if isinstance(self.picture, Image.Image):
            return self.picture
        if self.picture.is_corrupt:
            raise OSError(f"it is damaged at {self.seconds:.2f} s")
        image = Image.fromarray(
            self.picture.to_ndarray(format="rgb24")
        )  # a fifth of the time of `to_image`
        degrees = _rotation(self.picture)
        return image.rotate(degrees, expand=True) if degrees else image


def read_facts(path: Path) -> VideoFacts:
    """What a video holds, from the times of all frames; only the first is decoded.

    Raises:
        Exception: whatever decoders raise for a file that is no video or is damaged; OSError if it
            has no frames, more than `MAX_SOURCE_FRAMES`, too many pixels, or a rate that is none.
    """
    with closing(_frames(path)) as frames:
        first = next(frames, None)
    if first is None:
        raise OSError("it has no frames")
    size = first.to_rgb().size
    times = _list_times(path)
    gaps = [after - before for before, after in pairwise(times)]
    usual = median(gaps) if gaps else first.duration_seconds
    duration = times[-1] - times[0] + usual
    if not 1 / MAX_SOURCE_FPS <= usual <= 1 / MIN_SOURCE_FPS or not math.isfinite(duration):
        raise OSError(f"its frames are {usual:g} s apart")
    is_variable = any(abs(gap - usual) > VARIABLE_SHARE * usual for gap in gaps)
    return VideoFacts(*size, first.seconds, duration, is_variable)


def choose_spans(
    facts: VideoFacts, choice: ClipChoice, lengths: Sequence[int], frames_per_second: float
) -> tuple[ClipSpan, ...]:
    """The clips that are taken of a video, of the largest of `lengths` (frames) that it has; none
    if it is too short.

    `head` takes the first, `all` one after the other, and a number so many, evenly spread from its
    start to its end.
    """
    available = math.ceil(facts.duration_seconds * frames_per_second - 0.5)
    length = max((one for one in lengths if one <= available), default=0)
    if not length:
        return ()
    spare = available - length
    if choice == "head":
        starts = [0]
    elif choice == "all":
        starts = list(range(0, spare + 1, length))
    else:
        starts = (
            [spare // 2]
            if choice == 1
            else [spare * part // (choice - 1) for part in range(choice)]
        )
    return tuple(
        ClipSpan(facts.start_seconds + start / frames_per_second, length, frames_per_second)
        for start in sorted(set(starts))[:MAX_CLIPS]
    )


def read_clip(path: Path, span: ClipSpan) -> Iterator[Image.Image]:
    """The frames of a clip as RGB: for each of its times the frame that is shown then, so that some
    repeat or drop.

    Raises:
        OSError: the file ends before the clip, or is damaged in it.
        Exception: whatever else decoders raise for a damaged file.
    """
    times = [
        span.start_seconds + (number + 0.5) / span.frames_per_second
        for number in range(span.num_frames)
    ]
    given = 0
    with closing(_frames(path, span.start_seconds)) as frames:
        for shown, following in pairwise(chain(frames, [None])):
            assert shown is not None
            last_end = shown.seconds + shown.duration_seconds + 1 / span.frames_per_second
            end = following.seconds if following else last_end
            if times[given] < end:
                image = shown.to_rgb()
                while given < len(times) and times[given] < end:
                    yield image
                    given += 1
            if given == len(times):
                return
    raise OSError(f"it ends after {given} of a clip's {len(times)} frames")


def is_animation(path: Path) -> bool:
    """Whether a gif or webp file has several frames; False for what cannot be opened."""
    try:
        with open_image(path, animated=True) as image:
            return getattr(image, "n_frames", 1) > 1
    except Exception:  # it is named when it is read
        return False


def _frames(path: Path, start_seconds: float | None = None) -> Generator[_Frame]:
    """Frames in the order shown, from some point before `start_seconds` on."""
    return (
        _animation_frames(path)
        if path.suffix.lower() in ANIMATION_SUFFIXES
        else _video_frames(path, start_seconds)
    )


def _list_times(path: Path) -> list[float]:
    """When each frame is shown, in order and in seconds."""
    if path.suffix.lower() in ANIMATION_SUFFIXES:
        return [frame.seconds for frame in _animation_frames(path, renders=False)]
    times = []
    with _open_video(path) as (container, stream):
        for packet in container.demux(stream):
            ticks = packet.dts if packet.pts is None else packet.pts
            if ticks is not None and not packet.is_discard:
                times.append(float(ticks * packet.time_base))
            if len(times) > MAX_SOURCE_FRAMES:
                raise OSError(f"it has over {MAX_SOURCE_FRAMES} frames")
    return sorted(times)


def _animation_frames(path: Path, *, renders: bool = True) -> Generator[_Frame]:
    seconds = 0.0
    with open_image(path, animated=True) as image:
        count = getattr(image, "n_frames", 1)
        if count * image.width * image.height > MAX_ANIMATION_PIXELS:
            raise OSError(
                f"its {count} frames of {image.width} x {image.height} px are too many: make it a "
                "video"
            )
        for number in range(count):
            image.seek(number)
            image.load()
            duration = float(image.info.get("duration") or 0) / 1000
            duration = DEFAULT_DELAY_SECONDS if duration <= 0.01 else duration
            yield _Frame(seconds, duration, to_rgb(image) if renders else None)
            seconds += duration


def _rotation(frame: Any) -> int:
    """Degrees counterclockwise by which a frame is turned to be shown."""
    return int(frame.rotation)


def _video_frames(path: Path, start_seconds: float | None) -> Generator[_Frame]:
    with _open_video(path) as (container, stream):
        usual = 1 / float(stream.average_rate) if stream.average_rate else 0.0
        if start_seconds is not None:
            container.seek(math.floor(start_seconds / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time is None:
                raise OSError("its frames have no times")
            if frame.width * frame.height > MAX_PIXELS:  # a stream may change its size
                raise OSError(f"its frames are over {MAX_PIXELS >> 20} megapixels")
            duration = float(frame.duration * frame.time_base) if frame.duration else usual
            yield _Frame(float(frame.time), duration, frame)


@contextmanager
def _open_video(path: Path) -> Iterator[tuple[Any, Any]]:
    """A container and its first video stream. ffmpeg gets an open file, so that it opens none by
    itself."""
    import av

    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file")
    options = {
        "format_whitelist": DEMUXERS,
        "protocol_whitelist": "",
        "max_pixels": str(MAX_PIXELS),
    }
    with path.open("rb") as file, av.open(file, options=options) as container:
        if not container.streams.video:
            raise OSError("it has no pictures")
        stream = container.streams.video[0]
        if stream.codec_context.width * stream.codec_context.height > MAX_PIXELS:
            raise OSError(f"its frames are over {MAX_PIXELS >> 20} megapixels: make them smaller")
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        stream.codec_context.thread_count = DECODER_THREADS
        stream.thread_type = "AUTO"
        yield container, stream
