"""Aspect buckets by area: which shape an image is resized to. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from autotune.data.dataset import Dataset
from autotune.errors import InvalidInput
from autotune.plan.workload import Bucket

MAX_ASPECT_RATIO = 4.0
"""More extreme images are cropped to this: models were not trained on longer strips."""

STEPS_PER_SIDE = 16
"""Sizes differ by a sixteenth of the resolution (64 px at 1024, as kohya's `bucket_reso_steps`):
finer steps crop less, but scatter a small dataset over many shapes, each with a remainder and a
recompile of its own."""


@lru_cache(maxsize=64)
def list_bucket_sizes(
    resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[tuple[int, int], ...]:
    """All (width, height) to choose from: multiples of `multiple_px` with at most `resolution_px`
    squared pixels.

    No side is longer than `max_side_px`. For each width the greatest height that fits, all of these
    in portrait orientation as well, and the greatest square.

    Raises:
        InvalidInput: the resolution is smaller than one multiple.
    """
    if resolution_px < multiple_px:
        raise InvalidInput(
            f"a resolution of {resolution_px} px is too small for this model",
            hint=f"use at least {multiple_px} px",
        )
    step = multiple_px * max(1, resolution_px // (STEPS_PER_SIDE * multiple_px))
    square = resolution_px // step * step
    sizes = {(square, square)}
    for width in range(step, int(resolution_px * math.sqrt(MAX_ASPECT_RATIO)) + 1, step):
        height = resolution_px**2 // width // step * step
        if (
            height
            and max(width / height, height / width) <= MAX_ASPECT_RATIO
            and max(width, height) <= max_side_px
        ):
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def choose_bucket_size(
    width: int, height: int, resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[int, int]:
    """The size whose aspect ratio is closest to `width:height`; of equals the one with more
    pixels, then the squarer one."""
    sizes = list_bucket_sizes(resolution_px, multiple_px, max_side_px)
    return min(sizes, key=lambda size: _distance(width, height, *size))


def _distance(
    width: int, height: int, to_width: int, to_height: int
) -> tuple[float, int, int, int]:
    ratio = abs(math.log(width * to_height / (height * to_width)))
    return round(ratio, 9), -to_width * to_height, max(to_width, to_height), to_width


def make_buckets(
    dataset: Dataset, resolution_px: int, multiple_px: int, max_side_px: int
) -> tuple[Bucket, ...]:
    """The buckets that the items of `dataset` fall into, sorted, each with its number of items
    (repeats not counted).

    A clip keeps its number of frames; clips and images never share a bucket.
    """
    counts = Counter(
        (
            *choose_bucket_size(
                item.width_px, item.height_px, resolution_px, multiple_px, max_side_px
            ),
            item.num_frames,
        )
        for item in dataset.items
    )
    return tuple(
        Bucket(width_px=width, height_px=height, num_frames=frames, num_items=number)
        for (width, height, frames), number in sorted(counts.items())
    )


def assign_buckets(dataset: Dataset, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """For each item the index of its bucket: the closest aspect ratio among those with its number
    of frames.

    With the buckets of `make_buckets` this gives the counts that they name; with the buckets of a
    plan it fits other data into the planned shapes.

    Raises:
        InvalidInput: no bucket has the number of frames of some item.
    """
    chosen = []
    for item in dataset.items:
        distances = {
            index: _distance(item.width_px, item.height_px, bucket.width_px, bucket.height_px)
            for index, bucket in enumerate(buckets)
            if bucket.num_frames == item.num_frames
        }
        if not distances:
            raise InvalidInput(
                f"{item.path.name} has {item.num_frames} frame(s), and no planned shape has as "
                "many",
                hint="plan again with this data: autotune plan --data DIR",
            )
        chosen.append(min(distances, key=distances.__getitem__))
    return tuple(chosen)
