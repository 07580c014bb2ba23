"""Does a model in one file of ComfyUI load as fast, and in as little memory, as from a folder?
FLUX.1, paired.

    PYTHONPATH=. python benchmarks/single_files.py --gigabytes 1 4 --repetitions 3

The file has the authors' layout, in which q, k, v and the feed-forward part of a single-stream
block are one tensor. Every load runs in a fresh process, as in `benchmarks/weights.py`, whose
sampler takes the memory; all ways take turns. The files are in the page cache, so that the clock
covers the program and not the disk. On a machine that others use only the CPU's seconds and the
peaks hold; wall seconds are what they were.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from weights import (
    MIB,
    MemorySampler,
    describe_machine,
    in_fresh_process,
    in_turn,
    save,
    spread,
    touch,
)

WAYS = (
    "folder, safetensors",
    "file bf16, safetensors",
    "folder, pread",
    "file bf16, pread",
    "file fp8 scaled, safetensors",
    "from_single_file",
)
CONFIG = {"num_layers": 1, "guidance_embeds": True}
FIRST_GB, BLOCK_GB = 0.80, 0.283
"""In bf16: everything but the single-stream blocks, and each of these."""


def build(num_blocks):
    import torch
    from diffusers import FluxTransformer2DModel

    from autotune.weights.building import build_empty

    return build_empty(
        lambda: FluxTransformer2DModel(**CONFIG, num_single_layers=num_blocks), dtype=torch.bfloat16
    )


def write(queue, folder, num_blocks):
    from safetensors.torch import save_file

    from autotune.weights.streaming import fill_random
    from tests.weights.original_layouts import flux1, scaled_fp8

    model = build(num_blocks)
    fill_random(model, seed=0)
    model.save_config(folder)
    save(folder, model)
    state = flux1(model.state_dict())
    del model
    save_file(state, folder.parent / "file bf16.safetensors")
    save_file(scaled_fp8(state), folder.parent / "file fp8 scaled.safetensors")
    queue.put(None)


def load(way, folder, num_blocks):
    import torch
    from diffusers import FluxTransformer2DModel

    from autotune.weights.building import from_pretrained_dtypes
    from autotune.weights.single_file import view_as
    from autotune.weights.sources import open_weights
    from autotune.weights.streaming import load_into

    if way == "from_single_file":
        path = folder.parent / "file bf16.safetensors"
        return FluxTransformer2DModel.from_single_file(
            str(path), config=str(folder), torch_dtype=torch.bfloat16
        )
    model = build(num_blocks)
    place, _, loader = way.partition(", ")
    is_file = place != "folder"
    source = open_weights(folder.parent / f"{place}.safetensors" if is_file else folder)
    policy = from_pretrained_dtypes(model, torch.bfloat16)
    load_into(
        model, view_as(source, model) if is_file else source, loader=loader, dtype_policy=policy
    )
    return model


def run_load(queue, way, folder, num_blocks):
    from autotune.runtime.quiet import silence_libraries, silence_progress_bars

    silence_libraries()
    silence_progress_bars()
    with MemorySampler() as memory:
        start, start_cpu = time.perf_counter(), time.process_time()
        touch(load(way, folder, num_blocks))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    queue.put({"seconds": round(seconds, 4), "cpu_seconds": round(cpu_seconds, 4), **memory.peaks})


def measure(context, scratch, gigabytes, repetitions):
    num_blocks = max(1, round((gigabytes - FIRST_GB) / BLOCK_GB))
    folder = scratch / "model"
    folder.mkdir(parents=True)
    in_fresh_process(context, write, folder, num_blocks)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for repetition in range(repetitions + 1):
        for way in in_turn(WAYS, repetition):
            result = in_fresh_process(context, run_load, way, folder, num_blocks)
            if repetition:  # the first brings the files into the cache
                of_run = {"way": way, "repetition": repetition, "checkpoint_bytes": size}
                yield {**of_run, **result, "load_average": os.getloadavg()[0]}


def summary(rows, machine):
    lines = [f"# Models in single files, {machine['date']}", ""]
    lines += [f"{key}: {value}  " for key, value in machine.items() if key != "date"]
    lines += [
        "",
        "A busy machine: wall seconds say little, CPU seconds and peaks hold. Median (smallest to "
        "largest).",
        "",
    ]
    lines += ["| GB | way | CPU s | wall s | anonymous MiB | mapped | resident |", "|" + "---|" * 7]
    for size in sorted({row["checkpoint_bytes"] for row in rows}):
        for way in WAYS:
            found = [row for row in rows if (row["checkpoint_bytes"], row["way"]) == (size, way)]
            if not found:
                continue
            cpu, wall = ([row[key] for row in found] for key in ("cpu_seconds", "seconds"))
            peaks = ("peak_anonymous_bytes", "peak_mapped_bytes", "peak_resident_bytes")
            anonymous, mapped, resident = ([row[key] / MIB for row in found] for key in peaks)
            lines.append(
                f"| {size / 1e9:.1f} | {way} | {spread(cpu, 2)} | {spread(wall, 1)} | "
                f"{spread(anonymous, 0)} "
                f"| {statistics.median(mapped):.0f} | {statistics.median(resident):.0f} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "diffusers.models.transformers.transformer_flux", "safetensors.torch"]
    )
    machine, rows = describe_machine(), []
    results = options.output / f"single-files-{machine['date']}.jsonl"
    results.write_text(json.dumps(machine) + "\n")
    for gigabytes in options.gigabytes:
        scratch = Path(tempfile.mkdtemp(dir=options.scratch))
        try:
            for row in measure(context, scratch, gigabytes, options.repetitions):
                rows.append(row)
                with results.open("a") as log:
                    log.write(json.dumps(row) + "\n")
        finally:
            shutil.rmtree(scratch)
        results.with_suffix(".md").write_text(summary(rows, machine))
    print(summary(rows, machine))


if __name__ == "__main__":
    main()
