"""A folder is read completely, what is no good is named, and some images are held out."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from autotune.data.captions import last_edit
from autotune.data.dataset import DataReport, check_dataset, read_dataset, read_split, scan_dataset
from autotune.data.items import DatasetOptions
from autotune.errors import InvalidInput
from autotune.models.registry import get_family
from autotune.report.machine import data_report_lines
from autotune.training import check_data
from tests.data.pictures import CAPTIONS, picture, write_pictures


def kinds(dataset):
    return {problem.file: problem.kind for problem in dataset.problems}


def test_metadata_names_captions_and_mistakes(tmp_path):
    for name in ("a.png", "b.png"):
        picture(ord(name[0])).save(tmp_path / name)
    lines = [
        json.dumps({"file_name": "a.png", "text": "from metadata"}),
        "{broken",
        json.dumps({"file_name": "b.png"}),
        json.dumps({"file_name": "b.png", "text": "half a smile: \ud83d"}),
        json.dumps({"file_name": "../../etc/passwd", "text": "elsewhere"}),
        json.dumps({"file_name": "a.png", "text": "again"}),
        json.dumps({"file_name": "b.png", "text": "a\0dog"}),
    ]
    (tmp_path / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    (tmp_path / "a.txt").write_text("from the text file")
    (tmp_path / "b.txt").write_text("  two\nlines ")
    dataset = read_dataset(tmp_path)
    assert [item.caption for item in dataset.items] == ["from metadata", "two lines"]
    told = [problem.message.split(":")[0] for problem in dataset.problems]
    assert told == ["line 2", "line 3", "line 4", "no image ../../etc/passwd", "line 6", "line 7"]


@given(content=st.binary(max_size=200))
@settings(max_examples=60)
def test_no_metadata_file_crashes_the_reader(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("metadata")
    (folder / "metadata.jsonl").write_bytes(content)
    problems = scan_dataset(folder).problems
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert len(problems) == sum(bool(line.strip()) for line in lines)
    (folder / "metadata.csv").write_bytes(b"file_name,text\n" + content)
    scan_dataset(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 9999, '{"what": 1, "was": []}', '{"what": "", "was": [["a", 3]]}']
)
def test_damaged_edits_are_not_undone(tmp_path, content):
    (file := tmp_path / "undo.jsonl").write_text(content)
    assert last_edit(file) is None


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
@pytest.mark.parametrize("keep", [0.02, 0.9])
def test_truncated_images_are_broken(tmp_path, suffix, keep):
    path = tmp_path / f"a.{suffix}"
    picture(0, 200, 100).save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert kinds(scan_dataset(tmp_path, DatasetOptions(caption="x"))) == {f"a.{suffix}": "broken"}


def test_every_kind_of_problem_is_named(tmp_path):
    write_pictures(tmp_path, (64, 64), (20, 64), *[(64, 64)] * 4)
    (tmp_path / "copy.png").write_bytes((tmp_path / "000.png").read_bytes())
    (tmp_path / "copy.txt").write_text("the same again")
    (tmp_path / "002.txt").unlink()
    (tmp_path / "003.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "004.txt").write_text("\u200b \ufeff")
    (tmp_path / "005.txt").write_text("a\0dog")
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "photo.heic").write_bytes(b"")
    dataset = scan_dataset(tmp_path)
    assert [item.path.name for item in dataset.items] == ["000.png"]
    assert kinds(dataset) == {
        "001.png": "tiny",
        "002.png": "captionless",
        "003.png": "broken",
        "copy.png": "duplicate",
        "004.png": "captionless",
        "005.png": "broken",
        "text.jpg": "broken",
        "photo.heic": "unsupported",
    }


def test_dead_links_and_pipes_are_named(tmp_path):
    write_pictures(tmp_path, (64, 64))
    (tmp_path / "lost.png").symlink_to(tmp_path / "elsewhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    dataset = scan_dataset(tmp_path, DatasetOptions(caption="x"))
    assert len(dataset.items) == 1
    assert kinds(dataset) == {"lost.png": "broken", "pipe.png": "broken"}
    assert "elsewhere" not in dataset.problems[0].message
    (tmp_path / "to pipe.png").symlink_to(tmp_path / "pipe.png")
    found = kinds(scan_dataset(tmp_path, DatasetOptions(caption="x")))
    assert found == dict.fromkeys(("lost.png", "pipe.png", "to pipe.png"), "broken")


def test_edit_pairs_match_by_stem(tmp_path):
    data, control = write_pictures(tmp_path / "data", *[(64, 64)] * 5), tmp_path / "control"
    control.mkdir()
    names = ("000.jpg", "001_1.png", "001_2.png", "002_1.png", "002_3.png")
    for seed, name in enumerate(names, start=50):
        picture(seed).save(control / name)
    (control / "004.png").write_bytes(b"no image")
    dataset = read_dataset(data, DatasetOptions(control=control))
    found = [[path.name for path in item.control_paths] for item in dataset.items]
    assert found == [["000.jpg"], ["001_1.png", "001_2.png"]]
    assert kinds(dataset) == {"002.png": "control", "003.png": "control", "004.png": "broken"}


@pytest.mark.parametrize("spelled", ["../photos/control", "link"])
def test_control_folders_are_not_data(tmp_path, monkeypatch, spelled):
    data = write_pictures(tmp_path / "photos", (64, 64))
    write_pictures(data / "control", (64, 64))
    (tmp_path / "link").symlink_to(data / "control")
    monkeypatch.chdir(tmp_path)
    control = Path("link") if spelled == "link" else Path("photos", spelled)
    dataset = read_dataset(Path("photos"), DatasetOptions(control=control))
    assert [item.path for item in dataset.items] == [Path("photos/000.png")]
    assert dataset.problems == ()
    (found,) = dataset.items[0].control_paths
    assert found.resolve() == data / "control" / "000.png"


def test_frame_folders_are_clips(tmp_path):
    for number in (1, 2, 10):
        (tmp_path / "clip").mkdir(exist_ok=True)
        picture(number, 64, 48).save(tmp_path / "clip" / f"f{number}.png")
    (tmp_path / "clip.txt").write_text("a moving fox")
    write_pictures(tmp_path / "brief", (64, 64))
    picture(7).save(tmp_path / "still.png")
    dataset = read_dataset(tmp_path, DatasetOptions(num_frames=3, caption="x"))
    clip, still = dataset.items
    assert [path.name for path in clip.frame_paths] == ["f1.png", "f2.png", "f10.png"]
    assert (clip.caption, clip.num_frames) == ("a moving fox", 3)
    assert (clip.width_px, clip.height_px) == (64, 48)
    assert (still.num_frames, still.frame_paths) == (1, ())
    assert kinds(dataset) == {"brief": "short", "brief/000.txt": "unread"}


def test_kohya_folders_tell_repeats(tmp_path):
    write_pictures(tmp_path / "10_dog" / "more", (64, 64))
    write_pictures(tmp_path / "0_none", (64, 64), first=1)
    write_pictures(tmp_path / "2024_holiday", (64, 64), first=2)
    write_pictures(tmp_path / "3_cat", (64, 64), first=3)
    line = {"file_name": "3_cat/003.png", "repeats": 7}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    found = {item.path.parent.name: item.repeats for item in read_dataset(tmp_path).items}
    assert found == {"more": 10, "0_none": 1, "2024_holiday": 1, "3_cat": 7}
    report = check_dataset(tmp_path, get_family("flux1-dev"), resolution_px=64)
    assert (report.num_usable, report.epoch_size) == (4, 19)
    assert any("an epoch shows 19" in line for line in data_report_lines(report))


@pytest.mark.parametrize("name", ["metadata.jsonl", "a.txt"])
@pytest.mark.parametrize("content", ["pipe", "zero", "sparse"])
def test_endless_captions_are_not_read(tmp_path, name, content):
    picture(0).save(tmp_path / "a.png")
    if content == "pipe":
        os.mkfifo(tmp_path / name)
    elif content == "zero":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(20 << 30)
    problems = scan_dataset(tmp_path, DatasetOptions(caption="a")).problems
    told = " ".join(one.message for one in problems)
    assert any(reason in told for reason in ("not a regular file", "larger than", "is a link"))


def test_captions_are_found_in_every_form(tmp_path):
    names = ("a", "b", "c", "d", "cafe\u0301", "train/f", "train/g")
    for seed, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(seed).save(tmp_path / f"{name}.png")
    for name in ("a.caption", "b.png.txt", "C.TXT", "caf\u00e9.txt"):
        (tmp_path / name).write_text(name, encoding="utf-16" if name == "C.TXT" else "utf-8")
    (tmp_path / "metadata.csv").write_text('file_name,text\nD.png,"in csv, with\nlines"\n')
    line = {"file_name": "f.png", "text": "in train"}
    (tmp_path / "train" / "metadata.jsonl").write_text(json.dumps(line))
    (tmp_path / "train" / "g.json").write_text("{}")
    (tmp_path / "a.json").write_text("{}")  # its image has a caption
    (tmp_path / "captions.csv").write_text("image,caption")
    (tmp_path / "e.txt").write_text("of no image")
    for name in ("README.md", "train/g.tags"):
        (tmp_path / name).write_text("text")
    dataset = scan_dataset(tmp_path, DatasetOptions(trigger="sks"))
    found = "a.caption", "b.png.txt", "C.TXT", "café.txt", "in csv, with lines", "in train"
    assert [item.caption for item in dataset.items] == [*(f"sks, {one}" for one in found), "sks"]
    unread = ("captions.csv", "e.txt", "train/g.json", "train/g.tags")
    assert kinds(dataset) == dict.fromkeys(unread, "unread")


def test_case_tells_captions_apart(tmp_path):
    for seed, name in enumerate(("a", "A")):
        picture(seed).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"of {name}")
    if len(list(tmp_path.iterdir())) == 4:  # the file system tells them apart
        assert [item.caption for item in read_dataset(tmp_path).items] == ["of A", "of a"]


def test_masks_match_in_another_case(tmp_path):
    data, control = tmp_path / "data", tmp_path / "control"
    for folder, seed in ((data, 0), (control, 1)):
        folder.mkdir()
        picture(seed).save(folder / ("e\u0301.png" if seed else "\u00e9.PNG"))
    picture(2).save(data / "E\u0301.MASK.png")
    options = DatasetOptions(caption="x", control=control, loss_mask="files")
    (item,) = read_dataset(data, options).items
    assert item.mask_path is not None
    assert len(item.control_paths) == 1
    (data / "E\u0301.MASK.png").rename(data / "E\u0301_mask.bmp")
    with pytest.raises(InvalidInput, match="mask"):
        read_split(data, options, None, 0)
    with pytest.raises(InvalidInput, match="mask"):
        check_data(data, caption="x", loss_mask="alpha")


def test_links_out_bring_nothing(tmp_path):
    data, private = tmp_path / "data", tmp_path / "private"
    write_pictures(data, (64, 64), (64, 64))
    write_pictures(private, (64, 64), first=7)
    for name in ("000.txt", "metadata.jsonl"):
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to(private / "007.txt")
    (data / "more").symlink_to(private)
    (data / "again").symlink_to(data)
    (data / "001.txt").rename(data / "inside")
    (data / "001.txt").symlink_to("inside")
    dataset = scan_dataset(data, DatasetOptions(caption="x"))
    assert [item.caption for item in dataset.items] == ["x", CAPTIONS[1]]
    assert kinds(dataset) == dict.fromkeys(("000.txt", "metadata.jsonl", "more"), "link")


def test_linked_data_sets_are_read(tmp_path):
    blobs, data = write_pictures(tmp_path / "blobs", (64, 64)), tmp_path / "snapshot"
    data.mkdir()  # as the cache of Hugging Face has it
    for file in blobs.iterdir():
        (data / file.name).symlink_to(file)
    (item,) = read_dataset(data).items
    assert item.caption == CAPTIONS[0]


def test_a_good_folder(tmp_path):
    write_pictures(tmp_path, (640, 640), (64, 64), (80, 48), (300, 40), (32, 32))
    report = check_data(tmp_path, model="flux1-dev", resolution="128x32")  # plan's, in any form
    assert report.can_train
    edited = check_dataset(tmp_path, get_family("flux1-kontext"), resolution_px=64)
    assert not edited.can_train
    assert [each.kind for each in edited.problems] == ["model"] * 5
    found = [(bucket.width_px, bucket.height_px, bucket.num_items) for bucket in report.buckets]
    assert found == [(64, 64, 3), (80, 48, 1), (128, 32, 1)]
    told = report.enlarged, report.cropped, report.num_unverified
    assert told == (("004.png",), ("003.png",), 0)
    assert report.caption_words == (3, 6, 6)
    assert DataReport.model_validate_json(report.model_dump_json()) == report


OPTIONS = DatasetOptions(caption="a picture")


def names(split):
    parts = (split.training.items, split.held_out)
    return tuple({item.path.name for item in part} for part in parts)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held") / "images"
    write_pictures(folder, *[(64, 64)] * 20)
    return folder


def test_seed_and_names_hold_out(images, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(images, elsewhere)
    training, held_out = names(read_split(images, OPTIONS, "10%", 0))
    assert (len(training), len(held_out)) == (18, 2)
    assert not training & held_out
    assert names(read_split(elsewhere, OPTIONS, "10%", 0)) == (training, held_out)
    others = [names(read_split(images, OPTIONS, "10%", seed))[1] for seed in range(1, 5)]
    assert any(other != held_out for other in others)
    assert held_out < names(read_split(images, OPTIONS, "30%", 0))[1]


def test_held_out_images_never_train(images, tmp_path):
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


@pytest.mark.parametrize("has_tokenizer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cut_captions_are_named(tmp_path, has_tokenizer):
    write_pictures(tmp_path, (64, 64), (64, 64))
    (tmp_path / "000.txt").write_text("red, " * 60)  # each comma is a token of its own
    folder = None
    if has_tokenizer:
        from tests.small.parts import clip_tokenizer

        folder = tmp_path / ".model"
        clip_tokenizer(CAPTIONS).save_pretrained(folder / "tokenizer")
    report = check_dataset(tmp_path, get_family("sdxl"), resolution_px=64, tokenizers=folder)
    assert [name.partition(" ")[0] for name in report.cut_captions] == ["000.png"]
    assert any("77 tokens" in line for line in data_report_lines(report))
    assert not report.is_clean
