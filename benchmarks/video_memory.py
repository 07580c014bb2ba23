"""What reading a clip of a large video takes in memory, whether the file is brief or long. On the
CPU, with PyAV.

    PYTHONPATH=. python benchmarks/video_memory.py

Writes videos of 3840 x 2160 and 640 x 360 px, and reads clips from their head and their end as
encoding does, each in a fresh process, whose sampler takes the memory.
"""

import argparse
import itertools
import multiprocessing
import tempfile
from pathlib import Path

from weights import MIB, MemorySampler, describe_machine, in_fresh_process

SIZES = {"4K": (3840, 2160), "360p": (640, 360)}
SECONDS = (2, 10)
NUM_FRAMES, FRAMES_PER_SECOND, SIDE_PX = 17, 24, 512


def write(queue, path, size, seconds):
    import av
    import numpy as np

    noise = np.random.default_rng(0).integers(0, 255, (size[1] // 8, size[0] // 8, 3), np.uint8)
    picture = np.kron(noise, np.ones((8, 8, 1), np.uint8))
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=FRAMES_PER_SECOND, options={"preset": "ultrafast"}
        )
        stream.width, stream.height = size
        for number in range(seconds * FRAMES_PER_SECOND):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 8 * number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    queue.put(None)


def read(queue, path, start_seconds):
    from autotune.data.encode import open_pixels
    from autotune.data.video import ClipSpan

    with MemorySampler() as memory:
        pixels = open_pixels(
            [path], SIDE_PX, SIDE_PX, ClipSpan(start_seconds, NUM_FRAMES, FRAMES_PER_SECOND)
        )
    assert pixels.shape == (3, NUM_FRAMES, SIDE_PX, SIDE_PX)
    queue.put((memory.peaks, pixels.numel() * pixels.element_size()))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "av", "autotune.data.encode"])
    machine = describe_machine()
    lines = [f"{key}: {value}" for key, value in machine.items()]
    lines += [f"clips of {NUM_FRAMES} frames at {SIDE_PX} x {SIDE_PX} px", ""]
    with tempfile.TemporaryDirectory() as scratch:
        for (name, size), seconds in itertools.product(SIZES.items(), SECONDS):
            path = Path(scratch) / f"{name}-{seconds}.mp4"
            in_fresh_process(context, write, path, size, seconds)
            for place, start in (("head", 0.0), ("end", seconds - 1.0)):
                peaks, clip_bytes = in_fresh_process(context, read, path, start)
                lines.append(
                    f"{name}, {seconds:2} s, {path.stat().st_size / MIB:5.1f} MiB, clip at its "
                    f"{place:4}: peak "
                    f"{peaks['peak_anonymous_bytes'] / MIB:4.0f} MiB anonymous, the clip itself "
                    f"{clip_bytes / MIB:.0f}"
                )
                print(lines[-1], flush=True)
    (options.output / f"video-memory-{machine['date']}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
