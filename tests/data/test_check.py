"""The check says what training would make of a folder, without raising for what lies in it."""

from autotune.data.dataset import DataReport, check_dataset
from autotune.data.items import DatasetOptions
from tests.data.pictures import write_pictures


def test_a_good_folder(tmp_path):
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


def test_captionless_images_and_empty_folders_are_reported_not_raised(tmp_path):
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
