"""The dataset check before training: what a folder holds, what is wrong with it, and how
training will use it."""

from autotune.data.batches import assign_buckets, make_buckets
from autotune.data.dataset import OnProgress, data_text, scan_dataset
from autotune.data.items import DatasetOptions, Item, PrintableStr, Problem
from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.job import DataPlace
from autotune.plan.workload import Bucket

MAX_UPSCALING = 1.5
"""By default images enlarged by more (per side) are counted: blur is learned like any other
feature."""

MAX_CROP = 0.25
"""By default images that lose more than this share of their area to the crop are named."""


class DataReport(Frozen):
    """What a data folder holds."""

    folder: PrintableStr
    resolution_px: int = PositiveInt
    num_usable: int = NaturalInt
    epoch_size: int = NaturalInt
    """Images per epoch, repeats included."""
    num_unverified: int = NaturalInt
    """Images whose headers are fine but whose pixels were not decoded, since time ran out."""
    num_with_controls: int = NaturalInt
    problems: tuple[Problem, ...]
    buckets: tuple[Bucket, ...]
    max_upscaling: float = MAX_UPSCALING
    max_crop: float = MAX_CROP
    num_enlarged: int = NaturalInt
    """Images enlarged by more than `max_upscaling`."""
    cropped: tuple[PrintableStr, ...]
    """Names of images that lose more than `max_crop` of their area."""
    caption_words: tuple[int, int, int] | None = None
    """Minimum, median and maximum number of words in a caption; None without any usable image."""

    @property
    def can_train(self) -> bool:
        """Whether `read_dataset` would accept the folder."""
        return self.num_usable > 0 and all(
            problem.kind != "captionless" for problem in self.problems
        )

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to complain of: what a strict check asks for."""
        return self.can_train and not (
            self.problems or self.num_enlarged or self.cropped or self.num_unverified
        )


def check_dataset(
    folder: DataPlace,
    options: DatasetOptions | None = None,
    *,
    resolution_px: int,
    multiple_px: int,
    max_side_px: int,
    max_upscaling: float = MAX_UPSCALING,
    max_crop: float = MAX_CROP,
    on_progress: OnProgress | None = None,
) -> DataReport:
    """Check every file as training would read it.

    Raises:
        InvalidInput: a folder does not exist, or the resolution is too small.
    """
    dataset = scan_dataset(folder, options or DatasetOptions(), on_progress)
    buckets = make_buckets(dataset, resolution_px, multiple_px, max_side_px)
    pairs = [
        (item, buckets[index])
        for item, index in zip(dataset.items, assign_buckets(dataset, buckets), strict=True)
    ]
    words = sorted(len(item.caption.split()) for item in dataset.items)
    return DataReport(
        folder=data_text(folder),
        resolution_px=resolution_px,
        num_usable=len(dataset.items),
        epoch_size=dataset.epoch_size,
        num_unverified=dataset.num_unverified,
        num_with_controls=sum(bool(item.control_paths) for item in dataset.items),
        problems=dataset.problems,
        buckets=buckets,
        max_upscaling=max_upscaling,
        max_crop=max_crop,
        num_enlarged=sum(_scale(item, bucket) > max_upscaling for item, bucket in pairs),
        cropped=tuple(
            item.path.name for item, bucket in pairs if _lost_share(item, bucket) > max_crop
        ),
        caption_words=(words[0], words[len(words) // 2], words[-1]) if words else None,
    )


def _scale(item: Item, bucket: Bucket) -> float:
    return max(bucket.width_px / item.width_px, bucket.height_px / item.height_px)


def _lost_share(item: Item, bucket: Bucket) -> float:
    used_area = bucket.width_px * bucket.height_px / _scale(item, bucket) ** 2
    return 1 - used_area / (item.width_px * item.height_px)
