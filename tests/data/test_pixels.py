"""Every kind of image becomes the RGB that a person sees, and videos clips at the model's rate."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image, ImageCms

from autotune.data import pixels as pictures, pixels as pixels_module
from autotune.data.dataset import read_dataset, scan_dataset
from autotune.data.items import DatasetOptions
from tests.data.pictures import STEP, picture, write_video


@pytest.mark.quick("jpg", (6, "png"), (6, "webp"))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_counts(tmp_path, suffix, orientation):
    upright = Image.new("RGB", (80, 40), "white")
    upright.paste((0, 0, 0), (0, 0, 40, 20))  # the top left quarter is black
    undo = [None, 0, 3, 1, 5, 2, 6, 4][orientation - 1]
    stored = upright if undo is None else upright.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[pictures.EXIF_ORIENTATION] = orientation
    path = tmp_path / f"a.{suffix}"
    stored.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    for decode in (False, True):
        assert pictures.read_size(path, decode=decode) == (80, 40)
    pixels = pictures.open_pixels([path], 80, 40)[:, 0]
    assert float(pixels[:, 10, 20].max()) < -0.9
    assert all(
        float(pixels[:, row, column].min()) > 0.9 for row, column in ((10, 60), (30, 20), (30, 60))
    )


@pytest.mark.parametrize("size", [(200, 80), (97, 61)])
@pytest.mark.parametrize("to_size", [(64, 64), (32, 64), (240, 160)])
def test_crops_are_centered_and_large(tmp_path, size, to_size):
    columns, rows = np.meshgrid(*(np.linspace(0, 255, side) for side in size))
    shades = np.stack([columns, rows, rows], axis=-1).round().astype(np.uint8)
    Image.fromarray(shades).save(tmp_path / "a.png")
    pixels = (pictures.open_pixels([tmp_path / "a.png"], *to_size)[:, 0] + 1) / 2
    scale = min(size[0] / to_size[0], size[1] / to_size[1])
    for channel, profile in ((0, pixels[0, to_size[1] // 2]), (1, pixels[1, :, to_size[0] // 2])):
        for share in (0.25, 0.5, 0.75):
            place = int(len(profile) * share)
            cut = (size[channel] - len(profile) * scale) / 2
            seen = cut + (place + 0.5) * scale - 0.5  # as indices count
            assert float(profile[place]) == pytest.approx(seen / (size[channel] - 1), abs=0.01)


def test_plain_pixels_are_exact(tmp_path):
    for seed in (0, 1):
        picture(seed, 64, 48).save(tmp_path / f"{seed}.png")
    pixels = pictures.open_pixels([tmp_path / "0.png", tmp_path / "1.png"], 64, 48)
    assert (pixels.shape, pixels.dtype) == ((3, 2, 48, 64), torch.float32)
    expected = np.stack([np.asarray(picture(seed, 64, 48)) for seed in (0, 1)])
    restored = ((pixels + 1) * 127.5).round().permute(1, 2, 3, 0).to(torch.uint8)
    assert np.array_equal(restored.numpy(), expected)


@pytest.mark.parametrize("kind", ["EPS", "GIF"])
def test_other_image_formats_are_refused(tmp_path, kind):
    picture(0).save(tmp_path / "a.png", format=kind)  # Pillow would hand an EPS to Ghostscript
    with pytest.raises(OSError, match="not a png, jpeg or webp"):
        pictures.read_size(tmp_path / "a.png", decode=True)
    with pytest.raises(OSError, match="not a png, jpeg or webp"):
        pictures.open_pixels([tmp_path / "a.png"], 32, 32)


# The product's own filter, lifted by pytest.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_bombs_are_refused_by_size(tmp_path):
    """Pillow opens up to 180 megapixels, of which converting 16-bit gray took 5 GiB."""
    Image.new("1", (13_370, 13_370)).save(tmp_path / "bomb.png")
    for decode in (False, True):
        with pytest.raises(OSError, match="13370 x 13370 px are over 64 megapixels"):
            pictures.read_size(tmp_path / "bomb.png", decode=decode)


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "LA", "P", "L", "CMYK"])
def test_bands_make_no_difference(mode, monkeypatch):
    random = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(random.integers(0, 2**16, (37, 29), dtype=np.uint16))
    else:
        image = Image.fromarray(random.integers(0, 256, (37, 29, 4), dtype=np.uint8)).convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    assert image.mode == mode
    whole = np.asarray(pictures.to_rgb(image))
    monkeypatch.setattr(pixels_module, "BAND_PIXELS", 100)
    assert np.array_equal(np.asarray(pictures.to_rgb(image)), whole)


def swapped_profile():
    """An ICC profile in which red and green have changed places, as its matrix tells."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = profile.index(b"rXYZ"), profile.index(b"gXYZ")
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(profile).replace(b"s\0R\0G\0B", b"o\0t\0h\0e").replace(b"sRGB", b"othe")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colors_follow_the_profile(tmp_path, mode):
    red = Image.new("RGB", (64, 64), (255, 0, 0)).convert(mode)
    red.save(tmp_path / "a.png", icc_profile=swapped_profile())
    red.save(tmp_path / "b.png", icc_profile=b"no profile")
    files = (tmp_path / "a.png", tmp_path / "b.png")
    swapped, plain = (pictures.open_pixels([file], 64, 64) for file in files)
    assert swapped[:, 0, 9, 9].tolist() == pytest.approx([-1, 1, -1], abs=0.02)
    assert plain[:, 0, 9, 9].tolist() == [1, -1, -1]


FIVE = DatasetOptions(num_frames=5, caption="x", frames_per_second=16)


def shown(path, span):
    gray = [image.convert("L").resize((1, 1)) for image in pictures.read_clip(path, span)]
    return [image.getpixel((0, 0)) / STEP for image in gray]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")]
)
def test_videos_are_resampled_to_the_model(tmp_path, name, codec):
    path = write_video(tmp_path / name, 30, fps=24, codec=codec)
    (item,) = read_dataset(tmp_path, FIVE).items
    # Each for the middle of its time.
    assert shown(path, item.span) == pytest.approx([0, 2, 3, 5, 6], abs=1.1)
    later = pictures.ClipSpan(item.span.start_seconds + 0.5, 5, 16)
    assert shown(path, later) == pytest.approx([12, 14, 15, 17, 18], abs=1.1)


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animations_are_clips(tmp_path, name):
    frames = [Image.new("RGB", (64, 48), (STEP * number,) * 3) for number in range(12)]
    options = {"lossless": True} if name.endswith("webp") else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=50, **options)
    picture(1).save(tmp_path / "still.webp")
    clip, still = read_dataset(tmp_path, FIVE).items
    assert (clip.num_frames, still.num_frames, still.span) == (5, 1, None)
    assert clip.span is not None
    assert shown(clip.path, clip.span) == [0, 1, 3, 4, 5]


def test_clips_are_head_all_or_spread(tmp_path):
    facts = pictures.read_facts(write_video(tmp_path / "a.mp4", 48, fps=24))
    starts = {
        choice: [
            round(span.start_seconds * 16)
            for span in pictures.choose_spans(facts, choice, (9, 5), 16)
        ]
        for choice in ("head", "all", 1, 3)
    }
    assert starts == {"head": [0], "all": [0, 9, 18], 1: [11], 3: [0, 11, 23]}


def test_faults_of_videos_are_named(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", 20).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.webm").write_bytes(b"")
    playlist = ("#EXTM3U", "#EXTINF:10,", f"file://{tmp_path}/whole.mp4", "#EXT-X-ENDLIST\n")
    (tmp_path / "list.mp4").write_text("\n".join(playlist))
    write_video(tmp_path / "rough.mkv", 9, times_ms=[0, 40, 80, 120, 400, 440, 480, 900, 940])
    write_video(tmp_path / "thin.mp4", 20, size=(64, 16))
    write_video(tmp_path / "slow.mp4", 12, fps=8)  # too short at the model's rate
    write_video(tmp_path / "exact.mp4", 12, fps=16)
    dataset = scan_dataset(tmp_path, FIVE)
    assert {problem.file: problem.kind for problem in dataset.problems} == {
        "cut.mp4": "broken",
        "empty.webm": "broken",
        "list.mp4": "broken",
        "rough.mkv": "variable",
        "thin.mp4": "tiny",
        "slow.mp4": "variable",
    }
    assert [item.path.name for item in dataset.items] == [
        "exact.mp4",
        "rough.mkv",
        "slow.mp4",
        "whole.mp4",
    ]
    assert "2 variable" not in " ".join(dataset.problem_summary)  # they are not left out


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_video_crashes_reader(tmp_path, data):
    source = tmp_path / "whole.mkv"
    if not source.exists():
        write_video(source, 12)
    content = bytearray(source.read_bytes())
    changes = st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))
    for place, value in data.draw(changes):
        content[place] = value
    folder = tmp_path / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "a.mkv").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    dataset = scan_dataset(folder, FIVE)
    assert len(dataset.items) + sum(problem.kind != "variable" for problem in dataset.problems) == 1


def test_videos_are_upright_in_their_bucket(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 20, size=(64, 48))
    monkeypatch.setattr("autotune.data.pixels._rotation", lambda frame: 90)
    (item,) = read_dataset(tmp_path, FIVE).items
    assert (item.width_px, item.height_px) == (48, 64)
    assert pictures.open_pixels([path], 32, 64, item.span).shape == (3, 5, 64, 32)
