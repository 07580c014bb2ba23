"""From image files to tensors: sizes from headers, honest decoding, conversion to RGB, resize and center-crop."""

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    from torch import Tensor

ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)
"""Values of the EXIF orientation that swap width and height."""


FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow goes by a file's content, whatever its name: of its other decoders one would start Ghostscript."""


def open_image(path: Path) -> Image.Image:
    """A png, jpeg or webp file; only its header is read.

    Raises:
        OSError: it is of another format, cannot be read, or is a pipe or device that might be read without end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no file")
    try:
        return Image.open(path, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError("it is no png, jpeg or webp image") from error


def read_size(path: Path, *, decode: bool) -> tuple[int, int]:
    """(width, height) in px as seen after EXIF rotation.

    Args:
        path: png, jpeg or webp file.
        decode: also decode every pixel, the only proof that the file is whole. Without it only the header is read.

    Raises:
        Exception: whatever Pillow raises for a file that is no image or is damaged.
    """
    with open_image(path) as image:
        width, height = image.size
        # A PNG's getexif() decodes the whole image when no EXIF stands before the pixels.
        raw = image.info.get("exif") if image.format == "PNG" and not decode else None
        orientation = image.getexif().get(ORIENTATION) if raw or image.format != "PNG" or decode else None
        if decode:
            # JPEG reads all data at any scale; an eighth saves most of the inverse transform.
            image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
            image.load()
    return (height, width) if orientation in SIDEWAYS else (width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB: rotated as EXIF says, transparency laid on white, 16-bit gray scaled rather than clipped."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        import numpy as np

        # Of the formats read here only PNG gives these modes, and its samples have 16 bits.
        gray = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(gray.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def crop_box(width: int, height: int, to_width: int, to_height: int) -> tuple[float, float, float, float]:
    """The largest centerd box (left, top, right, bottom) in an image with the aspect ratio of `to_width:to_height`."""
    scale = min(width / to_width, height / to_height)
    left, top = (width - to_width * scale) / 2, (height - to_height * scale) / 2
    return max(0.0, left), max(0.0, top), min(float(width), width - left), min(float(height), height - top)


def open_pixels(paths: Sequence[Path], width_px: int, height_px: int) -> "Tensor":
    """One image, or the frames of one clip, as float32 (3, frames, height, width) in [-1, 1].

    Raises:
        OSError: a file cannot be read or decoded.
    """
    import numpy as np
    import torch

    frames = []
    for path in paths:
        with open_image(path) as image:
            rgb = to_rgb(image)
        box = crop_box(*rgb.size, width_px, height_px)
        frames.append(np.asarray(rgb.resize((width_px, height_px), Image.Resampling.LANCZOS, box=box)))
    stacked = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2)
    return stacked.to(torch.float32) / 127.5 - 1
