"""Small image folders for the tests of the data room."""

from fractions import Fraction

import av
import numpy as np
from PIL import Image

CAPTIONS = ("a red fox in the snow", "a blue house by the sea", "two green pears")


def picture(seed, width=64, height=64):
    """Noise: no two alike, and nothing that compresses."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_pictures(folder, *sizes, first=0):
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes, start=first):
        picture(number, width, height).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(CAPTIONS[number % len(CAPTIONS)], encoding="utf-8")
    return folder


STEP = 5  # difference of brightness between a video's frames


def write_video(path, num_frames, *, fps=24, size=(64, 48), codec="libx264", times_ms=()):
    """A video whose frame k has the brightness k * `STEP`, and maybe a time of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(num_frames):
            shade = np.full((size[1], size[0], 3), number * STEP % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(shade, format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
