"""Do memory, descriptors and threads of a long run stay flat? Steps of a tiny model, then pictures.

    nice .venv/bin/python -P -m benchmarks.faults.soak [--steps 20000] [--pictures 10000]

The run writes previews, validates and keeps checkpoints. Slopes are those of the second half of the
run, for 1,000 steps, with an interval of 95% from ten blocks. Writes one JSON line for each.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

T_OF_8 = 2.306  # Student's t of 95%, for a slope through ten points
MAX_NAMED = 3


def slope(values: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the slope for 1,000 steps by ten blocks' means, and half of its interval of 95%."""
    size = len(values) // 10
    blocks = [values[at * size : (at + 1) * size] for at in range(10)]
    xs = [statistics.fmean(x for x, _ in block) / 1000 for block in blocks]
    ys = [statistics.fmean(y for _, y in block) for block in blocks]
    line = statistics.linear_regression(xs, ys)
    errors = [y - line.intercept - line.slope * x for x, y in zip(xs, ys, strict=True)]
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    return line.slope, T_OF_8 * (sum(error**2 for error in errors) / 8 / spread) ** 0.5


def soak_steps(scratch: Path, num_steps: int) -> None:
    from autotune.events import StepFinished
    from tests.events import steps_to
    from tests.train.conftest import make_bench

    bench, process = make_bench(scratch / "bench"), psutil.Process()
    bench.workload["effective_batch_size"] = 2
    # Touched whole beforehand, so that memory does not grow by what looks at it.
    rows = torch.full((num_steps // 10, 4), -1.0, dtype=torch.float64)

    def look(event: StepFinished) -> None:
        if event.step % 10 == 0:
            gc.collect(0)
            mib = process.memory_info().rss / 2**20
            seen = event.step, mib, process.num_fds(), threading.active_count()
            rows[event.step // 10 - 1] = torch.tensor(seen)
            if event.step % 1000 == 0:
                print(seen, file=sys.stderr, flush=True)

    job = {
        "num_steps": num_steps,
        "checkpointing_steps": max(20, num_steps // 100),
        "preview_steps": 1,
        "preview_prompts": ("a red circle",),
    }
    often = max(100, num_steps // 40)
    job |= {"preview_every": often, "validation": "40%"}
    job |= {"validation_every": often, "keep_best": True}
    began = time.monotonic()
    bench.train(bench.plan(**job, output=str(scratch / "run")), steps_to(look))
    late = rows[len(rows) // 2 :].tolist()
    row = {"soak": "steps", "number": num_steps, "seconds": round(time.monotonic() - began)}
    for at, name in enumerate(("memory_mib", "descriptors", "threads"), 1):
        found, half = slope([(int(each[0]), each[at]) for each in late])
        row[name] = {"last": late[-1][at], "per_1000_steps": round(found, 4), "±": round(half, 4)}
    print(json.dumps(row), flush=True)


def soak_pictures(scratch: Path, number: int) -> None:
    """Check and cache so many small pictures."""
    import resource

    from PIL import Image

    from autotune.data.cache import Cache
    from autotune.data.dataset import check_dataset, read_dataset
    from autotune.data.encode import Encoders, encode_dataset
    from autotune.models.registry import get_family
    from autotune.plan.candidate import CachingSettings
    from tests.train.conftest import CPU, make_bench

    bench, folder = make_bench(scratch / "bench-of-pictures"), scratch / "many"
    folder.mkdir()
    for at in range(number):
        color = at % 251, at // 251 % 251, at % 7
        Image.new("RGB", (32, 32), color).save(folder / f"{at:06}.png")
        (folder / f"{at:06}.txt").write_text(f"a red circle {at % MAX_NAMED}")
    began = time.monotonic()
    report = check_dataset(folder, get_family("flux1-dev"), resolution_px=32)
    checked = time.monotonic()
    plan = bench.plan()
    encoders = Encoders(bench.resolved, CachingSettings(), CPU, plan.frozen.settings.precision)
    data, buckets = read_dataset(folder), plan.frozen.workload.buckets
    encoded = encode_dataset(encoders, data, buckets, Cache(scratch / "cache"))
    row = {"soak": "pictures", "number": number, "checked": report.num_usable}
    row |= {"cached": len(encoded.items), "check_seconds": round(checked - began)}
    row |= {"cache_seconds": round(time.monotonic() - checked)}
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--pictures", type=int, default=10_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        os.environ |= dict.fromkeys(("XDG_CACHE_HOME", "XDG_DATA_HOME"), scratch)
        if asked.pictures:
            soak_pictures(Path(scratch), asked.pictures)
        if asked.steps:
            soak_steps(Path(scratch), asked.steps)


if __name__ == "__main__":
    main()
