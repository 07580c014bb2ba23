"""Every kind of image becomes the RGB that a person sees."""

import numpy as np
import pytest
import torch
from PIL import Image

from autotune.data import pixels as pixels_module
from autotune.data.pixels import EXIF_ORIENTATION, open_pixels, read_size, to_rgb
from tests.data.pictures import picture


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_counts_for_sizes_and_pixels(tmp_path, suffix, orientation):
    upright = Image.new("RGB", (80, 40), "white")
    upright.paste((0, 0, 0), (0, 0, 40, 20))  # the top left quarter is black
    undo = [None, 0, 3, 1, 5, 2, 6, 4][orientation - 1]
    stored = upright if undo is None else upright.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    path = tmp_path / f"a.{suffix}"
    stored.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    for decode in (False, True):
        assert read_size(path, decode=decode) == (80, 40)
    pixels = open_pixels([path], 80, 40)[:, 0]
    assert float(pixels[:, 10, 20].max()) < -0.9
    assert all(
        float(pixels[:, row, column].min()) > 0.9 for row, column in ((10, 60), (30, 20), (30, 60))
    )


@pytest.mark.parametrize("size", [(200, 80), (97, 61)])
@pytest.mark.parametrize("to_size", [(64, 64), (32, 64), (240, 160)])
def test_the_crop_is_centered_and_as_large_as_the_ratio_allows(tmp_path, size, to_size):
    columns, rows = np.meshgrid(*(np.linspace(0, 255, side) for side in size))
    Image.fromarray(np.stack([columns, rows, rows], axis=-1).round().astype(np.uint8)).save(
        tmp_path / "a.png"
    )
    pixels = (open_pixels([tmp_path / "a.png"], *to_size)[:, 0] + 1) / 2
    scale = min(size[0] / to_size[0], size[1] / to_size[1])
    for channel, profile in ((0, pixels[0, to_size[1] // 2]), (1, pixels[1, :, to_size[0] // 2])):
        for share in (0.25, 0.5, 0.75):
            place = int(len(profile) * share)
            seen = (
                (size[channel] - len(profile) * scale) / 2 + (place + 0.5) * scale - 0.5
            )  # as indices count
            assert float(profile[place]) == pytest.approx(seen / (size[channel] - 1), abs=0.01)


def test_pixels_without_resizing_are_exact_and_frames_are_stacked(tmp_path):
    for seed in (0, 1):
        picture(seed, 64, 48).save(tmp_path / f"{seed}.png")
    pixels = open_pixels([tmp_path / "0.png", tmp_path / "1.png"], 64, 48)
    assert (pixels.shape, pixels.dtype) == ((3, 2, 48, 64), torch.float32)
    expected = np.stack([np.asarray(picture(seed, 64, 48)) for seed in (0, 1)])
    restored = ((pixels + 1) * 127.5).round().permute(1, 2, 3, 0).to(torch.uint8)
    assert np.array_equal(restored.numpy(), expected)


@pytest.mark.parametrize("kind", ["EPS", "GIF"])
def test_other_formats_are_refused_under_any_name(tmp_path, kind):
    picture(0).save(tmp_path / "a.png", format=kind)  # Pillow would hand an EPS to Ghostscript
    with pytest.raises(OSError, match="not a png, jpeg or webp"):
        read_size(tmp_path / "a.png", decode=True)
    with pytest.raises(OSError, match="not a png, jpeg or webp"):
        open_pixels([tmp_path / "a.png"], 32, 32)


@pytest.mark.filterwarnings(
    "ignore::PIL.Image.DecompressionBombWarning"
)  # the product's own filter, lifted by pytest
def test_an_image_that_would_take_gigabytes_is_refused_by_its_size(tmp_path):
    """A file of 22 KiB: Pillow opens up to 180 megapixels, of which converting 16-bit gray took
    5 GiB."""
    Image.new("1", (13_370, 13_370)).save(tmp_path / "bomb.png")
    for decode in (False, True):
        with pytest.raises(OSError, match="13370 x 13370 px are over 64 megapixels"):
            read_size(tmp_path / "bomb.png", decode=decode)


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
    whole = np.asarray(to_rgb(image))
    monkeypatch.setattr(pixels_module, "BAND_PIXELS", 100)
    assert np.array_equal(np.asarray(to_rgb(image)), whole)
