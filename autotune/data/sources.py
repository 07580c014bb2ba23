"""Where a job's data lies: one folder or several, or a YAML file that lists several, each with
its own options."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.data.options import DatasetOptions
from autotune.errors import InvalidInput
from autotune.plan.base import Frozen
from autotune.plan.job import DataPlace, Place, each_place
from autotune.plan.listing import read_listing

SUFFIXES = (".yaml", ".yml")


class DataFolder(Frozen):
    """One folder of a job's data."""

    path: Place
    """The folder; a relative one is relative to the file that lists it."""
    repeats: int = Field(default=1, ge=1, le=1000)
    """Number of times that each image is seen per epoch, times what its folder's name or
    `metadata.jsonl` says."""
    weight: float = Field(default=1.0, gt=0, le=100)
    """Factor of the loss on its images."""
    caption: str | None = None
    """Caption of images that have none; the job's by default."""
    trigger: str | None = None
    """Word put in front of every caption that lacks it; the job's by default."""
    control: Place | None = None
    """Folder of control images, by the same stems."""
    regularization: bool = False
    """Whether its images show what the model shall not forget (prior preservation): no trigger
    goes before their captions."""

    def options(self, job: DatasetOptions) -> DatasetOptions:
        """How its files are read, in a job whose options are `job`."""
        return replace(
            job,
            caption=self.caption or job.caption,
            trigger=None if self.regularization else self.trigger or job.trigger,
            control=Path(self.control) if self.control else job.control,
        )


class _DataFile(Frozen):
    folders: tuple[DataFolder, ...] = Field(min_length=1, max_length=100)


def data_text(data: DataPlace) -> str:
    """Where data lies, for a message."""
    return ", ".join(each_place(data))


def is_list(data: DataPlace) -> bool:
    """Whether data is several places, or named by a file that lists folders."""
    return not isinstance(data, str | Path) or Path(data).suffix.lower() in SUFFIXES


def list_folders(data: DataPlace) -> tuple[DataFolder, ...]:
    """The folders of a job's data: of the files that list them, or the folders themselves.

    Raises:
        InvalidInput: a file cannot be read, or is no such list; a place is named twice; or a folder
            lies in another, whose images are read with all below it.
    """
    folders = tuple(folder for place in each_place(data) for folder in _listed(Path(place)))
    _require_apart([folder.path for folder in folders])
    return folders


def _require_apart(folders: Sequence[str]) -> None:
    real = [os.path.realpath(folder) for folder in folders]
    if twice := next(
        (folder for folder, one in zip(folders, real, strict=True) if real.count(one) > 1), None
    ):
        hint = (
            "name it once; `repeats` in a data.yaml shows its images more often (docs/training.md)"
        )
        raise InvalidInput(f"the data names {twice} twice", hint=hint)
    by_real = {Path(one): folder for one, folder in zip(real, folders, strict=True)}
    for inner, folder in by_real.items():
        if outer := next((by_real[parent] for parent in inner.parents if parent in by_real), None):
            raise InvalidInput(
                f"the data folder {folder} lies in {outer}, so its images would be trained twice",
                hint="name the outer folder alone; `repeats` in its metadata.jsonl, or a name such "
                "as 3_portraits, "
                "shows some images more often",
            )


def _listed(data: Path) -> tuple[DataFolder, ...]:
    if not is_list(data) or data.is_dir():
        return (DataFolder(path=str(data)),)
    hint = "write `folders:` with an entry `- path: FOLDER` for each; see docs/training.md"
    listed = read_listing(data, _DataFile, "data folders", hint).folders
    return tuple(one.changed(**_places(one, data.parent)) for one in listed)


def list_places(data: DataPlace) -> tuple[str, ...]:
    """All folders that a job's data lies in: images, and control images that a list names.

    Raises:
        InvalidInput: as `list_folders`.
    """
    return tuple(
        place
        for one in list_folders(data)
        for place in (one.path, one.control)
        if place is not None
    )


def _places(folder: DataFolder, base: Path) -> dict[str, Any]:
    named = {"path": folder.path, "control": folder.control}
    return {name: str(base / place) for name, place in named.items() if place is not None}
