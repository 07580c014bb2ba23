"""Which images are held out of training, so that the loss on them tells learning from
remembering."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.data.dataset import Dataset, read_dataset
from autotune.data.items import Item, file_digest
from autotune.data.options import DatasetOptions
from autotune.data.sources import data_text, list_places
from autotune.errors import InvalidInput
from autotune.plan.job import DataPlace

MAX_HELD_OUT = 32
"""Images that are held out at most: more would tell little more, cost time and not train."""


@dataclass(frozen=True)
class SplitDataset:
    """A dataset whose images are trained on, or held out."""

    training: Dataset
    held_out: tuple[Item, ...] = ()

    @property
    def whole(self) -> Dataset:
        """All images together: what is encoded, and what decides shapes and lengths."""
        return replace(self.training, items=(*self.training.items, *self.held_out))


def read_split(
    folder: DataPlace, options: DatasetOptions, validation: str | None, seed: int
) -> SplitDataset:
    """Read a data folder and hold some images out: a pure function of seed and file names decides
    which.

    `validation` is a share such as `10%`, a folder of held-out images, or None for none. What lies
    in that folder, and equal files elsewhere, are not trained on.

    Raises:
        InvalidInput: as `read_dataset` for either folder; or nothing would be left to train on.
    """
    dataset = read_dataset(folder, options)
    if validation is None:
        return SplitDataset(dataset)
    place, candidates, share = folder, dataset.items, 1.0
    if validation.endswith("%"):
        share = float(validation[:-1]) / 100
    else:
        place = Path(validation)
        candidates = read_dataset(place, options).items
        dataset = replace(dataset, items=_without_copies(dataset.items, candidates))
    names = _draw([_name(item, place) for item in candidates], share, seed)
    held_out = [item for item in candidates if _name(item, place) in names]
    training = tuple(item for item in dataset.items if item not in held_out)
    if not training:
        raise InvalidInput(
            f"with the images held out for validation, none of {data_text(folder)} is left to "
            "train on",
            hint=(
                "add images, hold out a smaller share, or name a folder of others: --validation "
                "FOLDER"
            ),
        )
    return SplitDataset(replace(dataset, items=training), tuple(held_out))


def _name(item: Item, folder: DataPlace) -> str:
    """The path below the data folder, or below the folder of a list that it lies in, after that
    folder's name.

    The second of several folders of one name gets a number: names tell apart what is drawn.
    """
    places = [Path(place) for place in list_places(folder)]
    at = next(at for at, place in enumerate(places) if item.path.is_relative_to(place))
    place, earlier = (
        places[at],
        len({one for one in places[:at] if one.name == places[at].name} - {places[at]}),
    )
    own = item.path.relative_to(place).as_posix()
    return own if len(places) == 1 else f"{place.name}{f' {earlier + 1}' if earlier else ''}/{own}"


def _draw(names: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """That share of the names, at least one and at most `MAX_HELD_OUT`: an added file changes
    few of the others."""
    unique = sorted(
        set(names),
        key=lambda name: hashlib.sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest(),
    )
    return frozenset(unique[: min(MAX_HELD_OUT, max(1, round(share * len(unique))))])


def _without_copies(items: Sequence[Item], held_out: Sequence[Item]) -> tuple[Item, ...]:
    """The items whose pixels are none of the held-out ones'; only files of equal sizes are read."""
    sizes = {path.stat().st_size for item in held_out for path in item.pixel_paths}
    digests = {file_digest(path) for item in held_out for path in item.pixel_paths}
    return tuple(
        item
        for item in items
        if not any(
            path.stat().st_size in sizes and file_digest(path) in digests
            for path in item.pixel_paths
        )
    )
