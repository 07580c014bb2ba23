"""From image files to pixels: sizes from headers, decoding that proves a file whole, conversion
to 8-bit RGB."""

import stat
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

EXIF_ORIENTATION = 0x0112
TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)
"""Values of the EXIF orientation that swap width and height."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow goes by a file's content, whatever its name: one of its other decoders would start
Ghostscript."""
ANIMATED_FORMATS = ("GIF", "WEBP")

CENTERING = {"center": (0.5, 0.5), "top": (0.5, 0.0)}
"""For each kind of crop, the share of what is cut off that is on the left, and at the top."""

MAX_PIXELS = 1 << 26
"""Pixels of an image, 8,192 x 8,192: decoded, and converted band by band, it takes up to 600
MiB. Pillow itself opens 180 million, for which a file of some 100 KiB is enough."""
LARGE_PIXELS = 1 << 24
"""Images from this size on are decoded one at a time, whatever the number of threads."""
BAND_PIXELS = 1 << 20
"""Pixels that are converted at a time."""
_large_image = threading.Lock()
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our limit is lower


def open_image(path: Path, *, animated: bool = False) -> Image.Image:
    """Open a png, jpeg or webp file, or with `animated` a gif or webp; only its header is read.

    Raises:
        OSError: it has another format, is too large, cannot be read, or is a pipe or device that
            might be read without end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file")
    try:
        image = Image.open(path, formats=ANIMATED_FORMATS if animated else FORMATS)
    except UnidentifiedImageError as error:
        kinds = "gif or webp" if animated else "png, jpeg or webp"
        raise OSError(f"it is not a {kinds} image") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise OSError(
            f"its {image.width} x {image.height} px are over {MAX_PIXELS >> 20} megapixels: make "
            "it smaller"
        )
    return image


def read_size(path: Path, *, decode: bool) -> tuple[int, int]:
    """(width, height) in px, after EXIF rotation, of a png, jpeg or webp file.

    With `decode` every pixel is decoded, the only proof that the file is whole; else only the
    header is read. Raises whatever Pillow raises for a file that is not an image or is damaged.
    """
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
    """The mask in a file in 8-bit gray: its brightness, or its alpha channel. Raises whatever
    Pillow raises."""
    with open_image(path) as image:
        if is_alpha:
            return ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
        return to_rgb(image).convert("L")


def is_black_mask(path: Path, *, is_alpha: bool) -> bool:
    """Whether a mask is 0 everywhere. Raises whatever Pillow raises."""
    with _large_image:
        return open_mask(path, is_alpha=is_alpha).getextrema() == (0, 0)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB: rotated as EXIF says, transparency on white, 16-bit gray scaled
    rather than clipped."""
    image = ImageOps.exif_transpose(image)
    converted = Image.new("RGB", image.size)
    height = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, height):
        band = image.crop((0, top, image.width, min(top + height, image.height)))
        converted.paste(_band_to_rgb(band), (0, top))
    return converted


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # of the formats read only PNG's 16 bits have these modes
        return image.convert("I").point(lambda value: value / 257 + 0.5).convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
