"""The check says what training would make of a folder, without raising for what lies in it."""

from pathlib import Path

import pytest
from PIL import Image

from autotune.data.check import DataReport, check_dataset
from autotune.data.options import DatasetOptions
from autotune.errors import InvalidInput
from tests.conftest import autotune_here
from tests.data.pictures import write_pictures


def test_a_good_folder(tmp_path: Path) -> None:
    write_pictures(tmp_path, (640, 640), (64, 64), (80, 48), (300, 40), (32, 32))
    report = check_dataset(tmp_path, resolution_px=64, multiple_px=16, max_side_px=8192)
    assert report.can_train
    assert [(bucket.width_px, bucket.height_px, bucket.num_items) for bucket in report.buckets] == [
        (64, 64, 3),
        (80, 48, 1),
        (128, 32, 1),
    ]
    assert (report.num_enlarged, report.cropped, report.num_unverified) == (1, ("003.png",), 0)
    assert report.caption_words == (3, 6, 6)
    assert DataReport.model_validate_json(report.model_dump_json()) == report


def test_a_report_names_each_folder_as_it_was_written(tmp_path: Path) -> None:
    folders = [write_pictures(tmp_path / name, (64, 64)) for name in ("dogs", "cats")]
    report = check_dataset(folders, resolution_px=64, multiple_px=16, max_side_px=8192)
    assert report.folder == f"{folders[0]}, {folders[1]}"


def test_captionless_images_and_empty_folders_are_reported_not_raised(tmp_path: Path) -> None:
    assert not check_dataset(tmp_path, resolution_px=64, multiple_px=16, max_side_px=8192).can_train
    write_pictures(tmp_path, (64, 64), (64, 64))
    (tmp_path / "000.txt").unlink()
    report = check_dataset(tmp_path, resolution_px=64, multiple_px=16, max_side_px=8192)
    assert (report.can_train, report.num_usable) == (False, 1)
    assert [(problem.file, problem.kind) for problem in report.problems] == [
        ("000.png", "captionless")
    ]
    assert check_dataset(
        tmp_path,
        resolution_px=64,
        multiple_px=16,
        max_side_px=8192,
        options=DatasetOptions(trigger="sks"),
    ).can_train


def test_the_command_looks_at_clips_as_training_would(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "clip", *[(64, 48)] * 5)
    (tmp_path / "clip.txt").write_text("a moving fox")
    for path in (tmp_path / "clip").glob("*.txt"):
        path.unlink()
    command = ("data", "check", tmp_path, "--model", "kandinsky5-video-lite", "--resolution", 64)
    good = autotune_here(capfd, *command, "--frames", 5)
    told = " ".join(good.stdout.split())  # lines break where the path is long
    assert (good.returncode, "1 usable" in told, "5 frames" in told) == (0, True, True)
    odd = autotune_here(capfd, *command, "--frames", 4)
    assert (odd.returncode, "use --frames 1 or --frames 5" in odd.stderr) == (2, True)
    short = autotune_here(capfd, *command)  # of the family's usual length
    assert (short.returncode, "has 5 frames, 29 are needed" in " ".join(short.stdout.split())) == (
        2,
        True,
    )


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no data folder"):
        check_dataset(tmp_path / "none", resolution_px=64, multiple_px=16, max_side_px=8192)


def test_strict_limits_and_the_contact_sheet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "data", (640, 640), (300, 40))
    sheet = tmp_path / "sheet.png"
    command = ("data", "check", tmp_path / "data", "--resolution", 64, "--strict", "--sheet", sheet)
    strict = autotune_here(capfd, *command)
    assert (strict.returncode, "1 cropped by more than 25%" in strict.stdout) == (2, True)
    with Image.open(sheet) as image:
        width, height = image.size
        assert image.getpixel((10, 10)) != (255, 255, 255)  # the first image
        captions = image.crop((0, height - 80, width, height)).convert("L")
        assert captions.getextrema() == (0, 255)  # black on white
    loose = autotune_here(capfd, *command, "--max-crop", 0.9)
    assert loose.returncode == 0
    image, before = (found := sorted((tmp_path / "data").glob("*.png")))[0], found[0].read_bytes()
    for inside in (image, image.with_name("sheet.png")):
        refused = autotune_here(capfd, *command[:-1], inside)
        assert (refused.returncode, "would lie in the data folder" in refused.stderr) == (2, True)
    assert (image.read_bytes(), sorted((tmp_path / "data").glob("*.png"))) == (before, found)
