"""The picture that the demo ends with: what was taught, then rows of prompts, before and after."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SIDE_PX, SMALL_PX, GAP_PX, TEXT_PX, FONT_PX = 112, 64, 10, 190, 17
PAPER, INK, MUTED = "#ffffff", "#202020", "#707070"
BLOCK_PX = TEXT_PX + 2 * (SIDE_PX + GAP_PX) + GAP_PX
"""Width of a prompt and its two images; there are two such blocks side by side."""


def draw_picture(
    taught: Sequence[Image.Image], rows: Sequence[tuple[str, Image.Image, Image.Image]]
) -> Image.Image:
    """A strip of the taught images, then prompts in two columns, each with the image before and
    the one after."""
    font = ImageFont.load_default(FONT_PX)
    lines = -(-len(rows) // 2)
    titles_at = 5 * GAP_PX + SMALL_PX
    picture = Image.new(
        "RGB", (2 * BLOCK_PX, titles_at + 3 * GAP_PX + lines * (SIDE_PX + GAP_PX)), PAPER
    )
    draw = ImageDraw.Draw(picture)

    def put(image: Image.Image, left: int, top: int, side: int) -> None:
        picture.paste(image.resize((side, side), Image.Resampling.BICUBIC), (left, top))
        draw.rectangle((left - 1, top - 1, left + side, top + side), outline="#dddddd")

    draw.text(
        (GAP_PX, GAP_PX // 2), f"taught with these {len(taught)} pictures", fill=MUTED, font=font
    )
    for number, image in enumerate(taught):
        put(image, GAP_PX + number * (SMALL_PX + GAP_PX - 1), 3 * GAP_PX, SMALL_PX)
    for number, (prompt, *images) in enumerate(rows):
        left, down = number // lines * BLOCK_PX + GAP_PX, titles_at + 3 * GAP_PX
        down += number % lines * (SIDE_PX + GAP_PX)
        words = prompt.replace(" on a ", "\non a ").replace(" background", "\nbackground")
        draw.text((left, down + SIDE_PX // 2 - 2 * FONT_PX), words, fill=INK, font=font)
        for image, title in zip(images, ("before", "after"), strict=True):
            place = left + TEXT_PX + (title == "after") * (SIDE_PX + GAP_PX)
            draw.text((place, titles_at), title, fill=MUTED, font=font)
            put(image, place, down, SIDE_PX)
    return picture
