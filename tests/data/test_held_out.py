"""Held-out images are a pure function of seed and names, and never train."""

import shutil
from pathlib import Path

import pytest

from autotune.data.dataset import SplitDataset, read_split
from autotune.data.items import DatasetOptions
from tests.data.pictures import write_pictures

OPTIONS = DatasetOptions(caption="a picture")


def write_images(folder: Path, number: int) -> None:
    write_pictures(folder, *[(64, 64)] * number)


def names(split: SplitDataset) -> tuple[set[str], set[str]]:
    return {item.path.name for item in split.training.items}, {
        item.path.name for item in split.held_out
    }


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held") / "images"
    write_images(folder, 20)
    return folder


def test_seed_and_names_decide_which_images_are_held_out(images, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(images, elsewhere)
    training, held_out = names(read_split(images, OPTIONS, "10%", 0))
    assert (len(training), len(held_out)) == (18, 2)
    assert not training & held_out
    assert names(read_split(elsewhere, OPTIONS, "10%", 0)) == (training, held_out), (
        "whatever the folder"
    )
    assert (
        len({frozenset(names(read_split(images, OPTIONS, "10%", seed))[1]) for seed in range(5)})
        > 1
    )
    assert held_out < names(read_split(images, OPTIONS, "30%", 0))[1], (
        "a larger share holds out more"
    )


def test_a_folder_of_held_out_images_never_trains_nor_do_copies_of_them(images, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(images, data)
    inside = data / "held"
    inside.mkdir()
    first, second, third, *_ = sorted(data.glob("*.png"))
    first.rename(inside / first.name)  # below the data
    shutil.copy(second, tmp_path / "copy.png")
    (tmp_path / "other").mkdir()
    shutil.copy(third, tmp_path / "other" / "renamed.png")  # the same bytes elsewhere
    assert names(read_split(data, OPTIONS, str(inside), 0))[1] == {first.name}
    training, held_out = names(read_split(data, OPTIONS, str(tmp_path / "other"), 0))
    assert held_out == {"renamed.png"}
    assert third.name not in training
    assert len(training) == 19
