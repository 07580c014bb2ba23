"""A contact sheet of a dataset: each image as it is cropped for training, with its caption
below.
"""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from autotune.data.items import Item
from autotune.data.pixels import CENTERING, open_image, to_rgb
from autotune.data.video import read_clip
from autotune.schema import Bucket

MAX_IMAGES = 120
"""Images of a sheet: of more, evenly spread ones."""
COLUMNS = 6
CELL_PX = 240
MARGIN_PX = 6
FONT_PX = 12
LINES = 5
"""Lines of a caption that are drawn; the rest is cut off."""
CHARACTERS = 38
"""Characters in a line of a caption."""


def make_contact_sheet(pairs: Sequence[tuple[Item, Bucket]]) -> Image.Image:
    """One image of the first frames of items in their shapes; what cannot be decoded stays gray."""
    step = max(1, -(-len(pairs) // MAX_IMAGES))
    shown = pairs[::step]
    line = FONT_PX + 3
    height = CELL_PX + LINES * line + MARGIN_PX
    rows = max(1, -(-len(shown) // COLUMNS))
    sheet = Image.new(
        "RGB", (COLUMNS * (CELL_PX + MARGIN_PX) + MARGIN_PX, rows * height + MARGIN_PX), "white"
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_PX)
    for number, (item, bucket) in enumerate(shown):
        left = MARGIN_PX + number % COLUMNS * (CELL_PX + MARGIN_PX)
        top = MARGIN_PX + number // COLUMNS * height
        picture = _thumbnail(item, bucket)
        sheet.paste(
            picture, (left + (CELL_PX - picture.width) // 2, top + (CELL_PX - picture.height) // 2)
        )
        for row, text in enumerate(textwrap.wrap(item.caption, CHARACTERS)[:LINES]):
            draw.text((left, top + CELL_PX + row * line), text, "black", font)
    return sheet


def _thumbnail(item: Item, bucket: Bucket) -> Image.Image:
    scale = CELL_PX / max(bucket.width_px, bucket.height_px)
    size = max(1, round(bucket.width_px * scale)), max(1, round(bucket.height_px * scale))
    try:
        return ImageOps.fit(_first_frame(item), size, centering=CENTERING[item.crop])
    except Exception:  # decoders raise anything for damaged files; the report names them
        return Image.new("RGB", size, "gray")


def _first_frame(item: Item) -> Image.Image:
    if item.span:
        return next(read_clip(item.path, item.span))
    with open_image(item.pixel_paths[0]) as image:
        return to_rgb(image)
