"""The sheet of samples shows every label and prompt whole."""

from PIL import Image, ImageChops

from autotune.plan.workload import Bucket
from autotune.train.sample import Preview, make_sheet


def sheet(prompt: str) -> Image.Image:
    preview = Preview(prompt, Bucket(width_px=64, height_px=64, num_frames=1, num_items=1), 4, 0)
    red = Image.new("RGB", (64, 64), "red")
    return make_sheet([preview], [(red, red)])


def test_samples_show_whole_labels():
    long = "a red heart on a green ground " * 6
    first, second = sheet(f"{long}, one"), sheet(f"{long}, two")
    assert ImageChops.difference(first, second).getbbox(), "the end of a prompt is seen"
    labels = first.crop((0, 0, first.width, 12))
    ends = [labels.crop((at - 3, 0, at, 12)) for at in (first.width // 2, first.width)]
    assert all(end.getextrema() == ((255, 255),) * 3 for end in ends), "nothing overlaps or is cut"
