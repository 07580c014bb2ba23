"""Reads the pictures of a run for its page: within bounds, made small and encoded anew, so that
no byte of a file goes into the page as it is."""

import io
from collections.abc import Sequence
from pathlib import Path

from autotune.data import open_image, to_rgb
from autotune.errors import first_line
from autotune.reporting import Comparison, Picture, PreviewPicture
from autotune.schema import MAX_PREVIEW_PROMPTS
from autotune.training import PREVIEW_NAME, PREVIEWS, comparison_file

MAX_PREVIEWS = 48
"""Previews on a page: of more, some of each prompt, the first and the last among them."""
MAX_FILES = 10_000
"""Files of a folder that are looked at."""
MAX_SIDE_PX = 320
MAX_COMPARED_SIDE_PX = 640
MAX_PIXELS = 1 << 24
SMALL_SIDE_PX = 128
"""Pictures up to this size are kept without loss."""


def read_previews(folder: Path, max_bytes: int, notes: list[str]) -> tuple[PreviewPicture, ...]:
    """The previews of a run by prompt and step; what cannot be read is named in `notes`."""
    previews, found = folder / PREVIEWS, []
    if not previews.is_dir():
        return ()
    for _, path in zip(range(MAX_FILES), previews.iterdir(), strict=False):
        if named := PREVIEW_NAME.fullmatch(path.name):
            found.append((int(named[2]), int(named[1]), path))
    numbers = sorted({number for number, _, _ in found})[:MAX_PREVIEW_PROMPTS]
    pictures: list[PreviewPicture] = []
    for number in numbers:
        steps = sorted((step, path) for at, step, path in found if at == number)
        for step, path in _spread(steps, MAX_PREVIEWS // len(numbers)):
            picture = _read_picture(path, MAX_SIDE_PX, notes)
            if picture is None:
                continue
            max_bytes -= len(picture.content)
            if max_bytes < 0:
                notes.append("Some previews were left out: together they are too large for a page.")
                return tuple(pictures)
            pictures.append(PreviewPicture(step, number, picture))
    return tuple(pictures)


def read_comparisons(
    folder: Path, prompts: Sequence[str], max_bytes: int, notes: list[str]
) -> tuple[Comparison, ...]:
    """Pictures of the same noise without and with the adapter, as far as the run has ended with
    them.
    """
    pairs = []
    for number, prompt in enumerate(prompts[:MAX_PREVIEW_PROMPTS]):
        files = [folder / comparison_file(adapter, number) for adapter in ("without", "with")]
        if not all(file.is_file() for file in files):
            continue
        pictures = [_read_picture(file, MAX_COMPARED_SIDE_PX, notes) for file in files]
        without, with_adapter = pictures
        if without is None or with_adapter is None:
            continue
        max_bytes -= len(without.content) + len(with_adapter.content)
        if max_bytes >= 0:
            pairs.append(Comparison(prompt, without, with_adapter))
    return tuple(pairs)


def _spread(items: list[tuple[int, Path]], number: int) -> list[tuple[int, Path]]:
    if len(items) <= number:
        return items
    return [items[round(at * (len(items) - 1) / (number - 1))] for at in range(number)]


def _read_picture(path: Path, max_side_px: int, notes: list[str]) -> Picture | None:
    try:
        with open_image(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise OSError(f"it has over {MAX_PIXELS >> 20} megapixels")
            small = to_rgb(image)
    except Exception as error:  # decoders raise anything for damaged files
        notes.append(f"{path.name} cannot be shown: {first_line(error)}")
        return None
    small.thumbnail((max_side_px, max_side_px))
    kind = "png" if max(small.size) <= SMALL_SIDE_PX else "jpeg"
    content = io.BytesIO()
    small.save(content, format=kind, **({"quality": 85} if kind == "jpeg" else {}))
    return Picture(content.getvalue(), kind, small.width, small.height)
