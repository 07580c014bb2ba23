"""Pictures of a run as files: PNGs whose metadata say what made them, clips, and a labeled sheet
that compares them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from autotune.data import has_video_decoder
from autotune.runtime import atomic_write

LINE_SHARE = 1 / 24
"""Height of a line of labels, as a share of a picture's."""
MIN_LINE_PX = 12
CLIP_QUALITY = "18"
"""x264's constant rate factor: what is lost cannot be seen."""
LABELS = ("without the adapter", "with the adapter")


@dataclass(frozen=True)
class ComparedPictures:
    """The same prompt and noise without and with the adapter."""

    without: Image.Image
    with_adapter: Image.Image
    prompt: str
    seed: int


def make_sheet(rows: Sequence[ComparedPictures]) -> Image.Image:
    """One image with a row per prompt: without the adapter on the left, with it on the right,
    prompt and seed below.
    """
    sizes = [image.size for row in rows for image in (row.without, row.with_adapter)]
    width, height = (max(side) for side in zip(*sizes, strict=True))
    line = max(MIN_LINE_PX, round(height * LINE_SHARE))
    row_height = height + 2 * line
    sheet = Image.new("RGB", (2 * width, row_height * len(rows)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(0.75 * line)
    for number, row in enumerate(rows):
        top = number * row_height
        for column, (label, image) in enumerate(
            zip(LABELS, (row.without, row.with_adapter), strict=True)
        ):
            draw.text((column * width + 2, top), label, "black", font)
            sheet.paste(image, (column * width, top + line))
        # the seed first: long prompts are cut off
        text = f"seed {row.seed}: {' '.join(row.prompt.split())}"
        draw.text((2, top + line + height), text, "black", font)
    return sheet


def save_image(image: Image.Image, path: Path, facts: Mapping[str, object]) -> None:
    """Write a PNG atomically, with `facts` as text in its metadata."""
    metadata = PngInfo()
    for name, value in facts.items():
        metadata.add_itxt(name, str(value))
    with atomic_write(path) as part:
        image.save(part, format="PNG", pnginfo=metadata)


def save_frames(
    frames: Sequence[Image.Image], path: Path, facts: Mapping[str, object], fps: float
) -> None:
    """Write the first frame as a PNG and, of several and with PyAV, all as an mp4 beside it."""
    save_image(frames[0], path, facts)
    if len(frames) > 1 and has_video_decoder():
        save_clip(frames, path.with_suffix(".mp4"), facts, fps)


def save_clip(
    frames: Sequence[Image.Image], path: Path, facts: Mapping[str, object], fps: float
) -> None:
    """Write an mp4 (H.264) atomically, with `facts` as its comment. Sides must be even. Needs
    PyAV.
    """
    import av

    rate = Fraction(fps).limit_denominator(1001)
    with atomic_write(path) as part, av.open(str(part), "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(
            {name: str(value) for name, value in facts.items()}
        )
        stream = container.add_stream("libx264", rate=rate, options={"crf": CLIP_QUALITY})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(frame.convert("RGB")), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
