"""From images, videos and animations to pixels, however damaged or hostile a file may be.

Videos are decoded by PyAV (ffmpeg), the rest by Pillow. No more than one decoded frame is held, and
nothing outside of the file is opened, whatever a file asks for.
"""

import importlib.util
import io
import math
import stat
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from autotune.errors import first_line
from autotune.plan.job import ClipChoice, Crop
from autotune.system.lazy import Tensor, torch

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi"})
ANIMATION_SUFFIXES = frozenset({".gif", ".webp"})
EXIF_ORIENTATION = 0x0112
TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height

FORMATS = ("PNG", "JPEG", "WEBP")  # one of Pillow's other decoders would start Ghostscript
ANIMATED_FORMATS = ("GIF", "WEBP")
# What files of other names turn out to be, by bytes near their start.
OTHER_CONTENTS = {
    b"ftyphe": "a HEIC image: `magick FILE FILE.png` converts it",
    b"ftypmif1": "a HEIC image: `magick FILE FILE.png` converts it",
    b"ftypavi": "an AVIF image: `magick FILE FILE.png` converts it",
    b"<html": "a web page: download the image itself",
    b"<!doctype": "a web page: download the image itself",
    b"https://git-lfs": "a pointer of Git LFS: `git lfs pull` fetches the image",
}
PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # by the color space of ICC profiles

CENTERING = {"center": (0.5, 0.5), "top": (0.5, 0.0)}  # shares of what is cut on the left, above

MAX_PIXELS = 1 << 26
"""Pixels of an image, 8,192 x 8,192: decoded, and converted band by band, it takes up to 600
MiB. Pillow itself opens 180 million, for which a file of some 100 KiB is enough."""
LARGE_PIXELS = 1 << 24  # from which images are decoded one at a time, whatever the threads
BAND_PIXELS = 1 << 20  # pixels that are converted at a time

DEMUXERS = "mov,matroska,avi"  # some of ffmpeg's others follow addresses that a file names
MAX_SOURCE_FRAMES = 1 << 20  # frames of a file: five hours at 60 a second
MAX_ANIMATION_PIXELS = 1 << 32  # 2,000 frames of 1080p: Pillow decodes all for their times
MAX_SOURCE_FPS = 1000.0
MIN_SOURCE_FPS = 0.5
MAX_CLIPS = 64  # clips of one file
VARIABLE_SHARE = 0.5  # of the usual distance, by which frames of a variable rate are off
DECODER_THREADS = 4  # each holds frames of its own
DEFAULT_DELAY_SECONDS = 0.1  # how long browsers show a frame that names 10 ms or less

_large_image = threading.Lock()
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our limit is lower


def has_video_decoder() -> bool:
    """Return whether PyAV is installed, which decodes video files."""
    return importlib.util.find_spec("av") is not None


class UnusableFile(OSError):
    """A file that is refused, and why: the text goes on after its name."""


def explain_damage(error: Exception) -> str:
    """Explain for people why a file cannot be decoded. Raises a MemoryError of this process again,
    which says nothing of the file; ffmpeg's tells that a damaged file asks for too much."""
    is_ffmpeg = type(error).__module__.startswith("av.")
    if isinstance(error, MemoryError) and not is_ffmpeg:
        raise error
    if isinstance(error, UnusableFile):
        return str(error)
    if isinstance(error, OSError) and error.errno and not is_ffmpeg:
        return f"it cannot be read: {error.strerror}"
    reason = getattr(error, "strerror", None) or first_line(error)
    if isinstance(error, MemoryError):
        reason = "it asks for more memory than any clip needs"
    return f"it is damaged or cut short ({reason})"


def open_image(path: Path, *, animated: bool = False) -> Image.Image:
    """Open a png, jpeg or webp file, or with `animated` a gif or webp; only its header is read.
    Raises OSError for another format, too many pixels, and what might be read without end."""
    _require_regular(path)
    limit = f"over {MAX_PIXELS >> 20} megapixels: make it smaller"
    try:
        image = Image.open(path, formats=ANIMATED_FORMATS if animated else FORMATS)
    except Image.DecompressionBombError as error:
        raise UnusableFile(f"it has {limit}") from error
    except UnidentifiedImageError as error:
        raise UnusableFile(_describe_content(path, animated=animated)) from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise UnusableFile(f"its {image.width} x {image.height} px are {limit}")
    return image


def _describe_content(path: Path, *, animated: bool) -> str:
    with path.open("rb") as file:
        start = file.read(64).lower()
    if not start:
        return "it is empty"
    kinds = "gif or webp" if animated else "png, jpeg or webp"
    found = next((f", but {what}" for key, what in OTHER_CONTENTS.items() if key in start), "")
    return f"it is not a {kinds} image{found}"


def _require_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnusableFile("it is not a regular file")


def read_size(path: Path, *, decode: bool) -> tuple[int, int]:
    """Read (width, height) in px, after EXIF rotation; with `decode` every pixel, the only proof
    that the file is whole. Raises whatever Pillow raises."""
    with open_image(path) as image:
        width, height = image.size
        # A PNG's getexif() decodes the whole image if no EXIF comes before the pixels.
        is_in_header = image.format != "PNG" or "exif" in image.info
        orientation = image.getexif().get(EXIF_ORIENTATION) if is_in_header or decode else None
        if decode:
            # JPEG reads all data at any scale; an eighth saves most of the inverse transform.
            image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
            with _large_image if image.width * image.height >= LARGE_PIXELS else nullcontext():
                image.load()
    return (height, width) if orientation in TRANSPOSED_ORIENTATIONS else (width, height)


def open_mask(path: Path, *, is_alpha: bool) -> Image.Image:
    """Read a mask in 8-bit gray: brightness, or the alpha channel. Raises as Pillow does."""
    with open_image(path) as image:
        if is_alpha:
            return ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
        return to_rgb(image).convert("L")


def is_black_mask(path: Path, *, is_alpha: bool) -> bool:
    """Return whether a mask is 0 everywhere. Raises whatever Pillow raises."""
    with _large_image:
        return open_mask(path, is_alpha=is_alpha).getextrema() == (0, 0)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit sRGB as viewers do: rotated as EXIF says, by the ICC profile, transparency
    on white, 16-bit gray scaled."""
    to_srgb = _read_profile(image.info.get("icc_profile"))
    image = ImageOps.exif_transpose(image)
    converted = Image.new("RGB", image.size)
    height = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, height):
        band = image.crop((0, top, image.width, min(top + height, image.height)))
        converted.paste(_band_to_rgb(band, to_srgb), (0, top))
    return converted


def _read_profile(content: bytes | None) -> tuple[str, ImageCms.ImageCmsTransform] | None:
    """The mode of the images that a profile describes, and their transform to sRGB."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content or b""))
        if "sRGB" in ImageCms.getProfileDescription(profile):
            return None
        mode = PROFILE_MODES[profile.profile.xcolor_space.strip()]
        srgb = ImageCms.createProfile("sRGB")
        return mode, ImageCms.buildTransform(profile, srgb, mode, "RGB")
    except (ImageCms.PyCMSError, OSError, KeyError):  # viewers ignore what they do not understand
        return None


def _band_to_rgb(
    image: Image.Image, to_srgb: tuple[str, ImageCms.ImageCmsTransform] | None
) -> Image.Image:
    if image.mode.startswith("I"):  # of the formats read only PNG's 16 bits have these modes
        image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if to_srgb and (image.mode == "CMYK") == (to_srgb[0] == "CMYK"):
        if image.mode != "CMYK":
            image = image.convert("RGB").convert(to_srgb[0])
        image = to_srgb[1].apply(image)
    image = image.convert("RGB")
    return Image.composite(image, Image.new("RGB", image.size, "white"), alpha) if alpha else image


@dataclass(frozen=True)
class ClipSpan:
    """The part of a video that is one training item, at the model's rate."""

    start_seconds: float
    num_frames: int
    frames_per_second: float


def open_pixels(
    paths: Sequence[Path],
    width_px: int,
    height_px: int,
    span: ClipSpan | None = None,
    *,
    crop: Crop = "center",
) -> Tensor:
    """Read an image or a clip, resized and cropped, as fp32 (3, frames, height, width)."""
    import numpy as np

    images = read_clip(paths[0], span) if span else map(_open_rgb, paths)
    size, method = (width_px, height_px), Image.Resampling.LANCZOS
    frames = [
        np.asarray(ImageOps.fit(one, size, method, centering=CENTERING[crop])) for one in images
    ]  # one at a time
    stacked = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2)
    return stacked.to(torch.float32).div_(127.5).sub_(1)


def _open_rgb(path: Path) -> Image.Image:
    with open_image(path) as image:
        return to_rgb(image)


def open_picture(path: Path) -> Image.Image:
    """Read an image, or the first frame of a video. Raises OSError or others."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return _open_rgb(path)
    with closing(_frames(path)) as frames:
        return next(frames).to_rgb()


@dataclass(frozen=True)
class VideoFacts:
    """Facts of a video file. Sizes are those of the frames as they are shown."""

    width_px: int
    height_px: int
    start_seconds: float
    duration_seconds: float
    is_variable: bool
    frames_per_second: float


@dataclass(frozen=True)
class _Frame:
    seconds: float
    duration_seconds: float
    picture: Any  # Pillow's image, or PyAV's frame, which is converted only if it is used

    def to_rgb(self) -> Image.Image:
        if isinstance(self.picture, Image.Image):
            return self.picture
        if self.picture.is_corrupt:
            raise UnusableFile(f"it is damaged at {self.seconds:.2f} s")
        # A fifth of the time of `to_image`.
        image = Image.fromarray(self.picture.to_ndarray(format="rgb24"))
        degrees = _rotation(self.picture)
        return image.rotate(degrees, expand=True) if degrees else image


def read_facts(path: Path) -> VideoFacts:
    """Describe a video by the times of all frames; only the first is decoded."""
    with closing(_frames(path)) as frames:
        first = next(frames, None)
    if first is None:
        raise UnusableFile("it has no frames")
    size = first.to_rgb().size
    times = _list_times(path)
    gaps = [after - before for before, after in pairwise(times)]
    usual = median(gaps) if gaps else first.duration_seconds
    duration = times[-1] - times[0] + usual
    if not 1 / MAX_SOURCE_FPS <= usual <= 1 / MIN_SOURCE_FPS or not math.isfinite(duration):
        raise UnusableFile(f"its frames are {usual:g} s apart")
    is_variable = any(abs(gap - usual) > VARIABLE_SHARE * usual for gap in gaps)
    return VideoFacts(*size, first.seconds, duration, is_variable, 1 / usual)


def choose_spans(
    facts: VideoFacts, choice: ClipChoice, lengths: Sequence[int], frames_per_second: float
) -> tuple[ClipSpan, ...]:
    """Choose a video's first, all, or so many evenly spread clips, as long as it allows."""
    available = math.ceil(facts.duration_seconds * frames_per_second - 0.5)
    length = max((one for one in lengths if one <= available), default=0)
    if not length:
        return ()
    spare = available - length
    if choice == "head":
        starts = [0]
    elif choice == "all":
        starts = list(range(0, spare + 1, length))
    elif choice == 1:
        starts = [spare // 2]
    else:
        starts = [spare * part // (choice - 1) for part in range(choice)]
    return tuple(
        ClipSpan(facts.start_seconds + start / frames_per_second, length, frames_per_second)
        for start in sorted(set(starts))[:MAX_CLIPS]
    )


def read_clip(path: Path, span: ClipSpan) -> Iterator[Image.Image]:
    """Yield for each time of a clip the frame that is shown then. Raises OSError or others."""
    rate = span.frames_per_second
    times = [span.start_seconds + (number + 0.5) / rate for number in range(span.num_frames)]
    given = 0
    with closing(_frames(path, span.start_seconds)) as frames:
        for shown, following in pairwise(chain(frames, [None])):
            assert shown is not None
            last_end = shown.seconds + shown.duration_seconds + 1 / rate
            end = following.seconds if following else last_end
            if times[given] < end:
                image = shown.to_rgb()
                while given < len(times) and times[given] < end:
                    yield image
                    given += 1
            if given == len(times):
                return
    raise UnusableFile(f"it ends after {given} of a clip's {len(times)} frames")


def is_animation(path: Path) -> bool:
    """Return whether a gif or webp file has several frames; False for what cannot be opened."""
    try:
        with open_image(path, animated=True) as image:
            return getattr(image, "n_frames", 1) > 1
    except Exception:  # it is named when it is read
        return False


def _frames(path: Path, start_seconds: float | None = None) -> Generator[_Frame]:
    if path.suffix.lower() in ANIMATION_SUFFIXES:
        return _animation_frames(path)
    return _video_frames(path, start_seconds)


def _list_times(path: Path) -> list[float]:
    if path.suffix.lower() in ANIMATION_SUFFIXES:
        return [frame.seconds for frame in _animation_frames(path, renders=False)]
    times = []
    with _open_video(path) as (container, stream):
        for packet in container.demux(stream):
            ticks = packet.dts if packet.pts is None else packet.pts
            if ticks is not None and not packet.is_discard:
                times.append(float(ticks * packet.time_base))
            if len(times) > MAX_SOURCE_FRAMES:
                raise UnusableFile(f"it has over {MAX_SOURCE_FRAMES} frames")
    return sorted(times)


def _animation_frames(path: Path, *, renders: bool = True) -> Generator[_Frame]:
    seconds = 0.0
    with open_image(path, animated=True) as image:
        count = getattr(image, "n_frames", 1)
        if count * image.width * image.height > MAX_ANIMATION_PIXELS:
            size = f"{image.width} x {image.height} px"
            raise UnusableFile(f"its {count} frames of {size} are too many: make it a video")
        for number in range(count):
            image.seek(number)
            image.load()
            duration = float(image.info.get("duration") or 0) / 1000
            duration = DEFAULT_DELAY_SECONDS if duration <= 0.01 else duration
            yield _Frame(seconds, duration, to_rgb(image) if renders else None)
            seconds += duration


def _rotation(frame: Any) -> int:
    return int(frame.rotation)


def _video_frames(path: Path, start_seconds: float | None) -> Generator[_Frame]:
    with _open_video(path) as (container, stream):
        usual = 1 / float(stream.average_rate) if stream.average_rate else 0.0
        if start_seconds is not None:
            container.seek(math.floor(start_seconds / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time is None:
                raise UnusableFile("its frames have no times")
            _require_small(frame)  # a stream may change its size
            duration = float(frame.duration * frame.time_base) if frame.duration else usual
            yield _Frame(float(frame.time), duration, frame)


def _require_small(frame: Any) -> None:
    if frame.width * frame.height > MAX_PIXELS:
        raise UnusableFile(f"its frames are over {MAX_PIXELS >> 20} megapixels: make them smaller")


@contextmanager
def _open_video(path: Path) -> Iterator[tuple[Any, Any]]:
    import av

    _require_regular(path)
    limit = {"max_pixels": str(MAX_PIXELS)}
    # A title in another encoding spoils no picture.
    given: dict[str, Any] = {
        "options": {"format_whitelist": DEMUXERS, "protocol_whitelist": ""} | limit,
        "metadata_errors": "replace",
    }
    with path.open("rb") as file, av.open(file, **given) as container:
        if not container.streams.video or not container.streams.video[0].codec_context:
            raise UnusableFile("it has no pictures that ffmpeg can decode")
        stream = container.streams.video[0]
        _require_small(stream.codec_context)
        stream.codec_context.options = limit
        stream.codec_context.thread_count = DECODER_THREADS
        stream.thread_type = "AUTO"
        yield container, stream
