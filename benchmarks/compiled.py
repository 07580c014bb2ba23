"""Compiled blocks of mid-size models on this CPU: start-up with an empty cache and a filled one,
steps, memory.

    python benchmarks/compiled.py FAMILY … [--formats none,torchao-int8] [--output FILE]

A line of JSON for each family, weight format and way (not compiled, cold, cached), each measured in
a process of its own: seconds of its first micro-batch, of the first at a second and at a third
shape, and of the fastest of several of the last one; and what that one allocated. Seconds are the
process's own and those of the C++ compilers that it started, so that other programs do not count;
one thread.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_STEADY = 5
SHAPES = ((256, 256, 32), (192, 320, 24), (320, 256, 17))
"""Width and height in pixels, and tokens of the captions; the last one is timed once it has run
before.
"""


def spent_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(name: str, weight_format: str, *, compiles: bool) -> dict[str, Any]:
    """In this process, with what its caches hold."""
    import torch
    from configs import MID
    from cost_accuracy import workload_of
    from cpu_truth import build, memory_events
    from torch.profiler import ProfilerActivity, profile

    from autotune.families.registry import FAMILIES
    from autotune.runtime.quiet import redirect_output
    from autotune.schema.candidate import Candidate
    from autotune.schema.workload import Bucket
    from autotune.training.step import Noising
    from autotune.trials.steps import synthetic_samples

    torch.set_num_threads(1)
    family, config, workload = FAMILIES[name], MID[name], workload_of(name)
    candidate = Candidate(
        micro_batch_size=2,
        checkpointed_blocks=0,
        quantization=weight_format,
        precision="fp32",
        compile="block" if compiles else "off",
    )
    transformer, adapter = build(family, config, workload, candidate)

    def micro_batch(shape: tuple[int, int, int]) -> float:
        width, height, tokens = shape
        frames = workload.largest_bucket.num_frames
        bucket = Bucket(width_px=width, height_px=height, num_frames=frames, num_items=2)
        samples = synthetic_samples(family, config, workload, bucket, [tokens] * 2, torch.float32)
        batch, before = family.collate(samples), spent_seconds()
        Noising().loss(family, transformer, batch, 0, 0).backward()  # type: ignore[no-untyped-call]
        for parameter in adapter:
            parameter.grad = None
        return spent_seconds() - before

    starts = [micro_batch(shape) for shape in SHAPES]
    micro_batch(SHAPES[-1])
    with (
        redirect_output(os.devnull),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        micro_batch(SHAPES[-1])
    level = peak = 0
    for size in memory_events(profiler):
        level += size
        peak = max(peak, level)
    steady = min(micro_batch(SHAPES[-1]) for _ in range(NUM_STEADY))
    return {"first_seconds": starts, "steady_seconds": steady, "pass_peak_bytes": peak}


def main() -> None:
    """Measure each in a process of its own, and write a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="+")
    parser.add_argument("--formats", default="none,torchao-int8")
    parser.add_argument("--output", type=Path, default=Path(os.devnull))
    parser.add_argument("--one", choices=("not compiled", "compiled"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (name,) = arguments.families
        print(json.dumps(measure(name, arguments.formats, compiles=arguments.one == "compiled")))
        return
    for name in arguments.families:
        for weight_format in arguments.formats.split(","):
            with tempfile.TemporaryDirectory() as cache:
                own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                for way in ("not compiled", "cold", "cached"):
                    one = "not compiled" if way == "not compiled" else "compiled"
                    command = [
                        sys.executable,
                        __file__,
                        name,
                        "--formats",
                        weight_format,
                        "--one",
                        one,
                    ]
                    done = subprocess.run(
                        command, env=os.environ | own, stdout=subprocess.PIPE, check=True, text=True
                    )
                    found = json.loads(done.stdout.splitlines()[-1])
                    line = json.dumps(
                        {"family": name, "format": weight_format, "way": way, **found}
                    )
                    print(line, flush=True)
                    with arguments.output.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
