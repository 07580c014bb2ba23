"""The same run in 1, 2 and 4 processes of this machine (CPU, gloo, DDP): time and CPU time of an
image, and what communication takes.

On a machine with fewer cores than processes, or a busy one, the time of an image says nothing about
scaling. CPU time of an image does (what several processes do more than one does), and so does the
share of a step that the first process spends in collectives, waiting for the others included.

    PYTHONPATH=. python benchmarks/cpu_scaling.py [--pixels 128] [--steps 40]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from autotune.schema import write_plan
from tests.training.small import SETTINGS, machine, make_plan, write_model_and_images

BATCH = 4
FIRST_STEP = 4
"""Before it, processes warm up."""


def cpu_seconds(root: psutil.Process) -> float:
    """CPU time so far of a process and all that it started."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """The steps so far."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]


def collective_share(trace: Path) -> float:
    """Share of the traced steps that the first process spent in gloo's collectives."""
    events = [
        one
        for one in json.loads(trace.read_text())["traceEvents"]
        if one.get("dur") and "ts" in one
    ]
    within = max(one["ts"] + one["dur"] for one in events) - min(one["ts"] for one in events)
    spans = sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if str(one["name"]).startswith("gloo:")
    )
    covered, end = 0.0, 0.0
    for start, stop in spans:  # some overlap
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / within


def run(folder: Path, number: int, options: argparse.Namespace) -> dict[str, object]:
    """One run in so many processes."""
    output = folder / f"in-{number}"
    settings = SETTINGS.changed(micro_batch_size=1)
    plan = make_plan(
        folder / "model", folder / "images", machine(), num_processes=number, settings=settings,
        num_steps=options.steps, checkpointing_steps=0, resolution_px=options.pixels,
        output=str(output),
    )  # fmt: skip
    write_plan(folder / f"plan-{number}.yaml", plan)
    command = [
        sys.executable,
        "-m",
        "autotune",
        "train",
        str(folder / f"plan-{number}.yaml"),
        "--trace",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    marks: list[tuple[int, float]] = []
    while process.poll() is None and (not marks or marks[-1][0] < options.steps):
        done = len(steps_of(output / "metrics.jsonl"))
        if done >= FIRST_STEP and (not marks or done > marks[-1][0]):
            marks.append((done, cpu_seconds(psutil.Process(process.pid))))
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"{number} processes ended with {process.returncode}")
    steps = steps_of(output / "metrics.jsonl")[marks[0][0] :]
    (first, before), (last, after) = marks[0], marks[-1]
    return {
        "processes": number,
        "seconds_per_image": round(sum(one["seconds"] for one in steps) / len(steps) / BATCH, 4),
        "cpu_seconds_per_image": round((after - before) / (last - first) / BATCH, 4),
        "collective_share": round(collective_share(output / "trace.json"), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model_and_images(folder)
        load = [round(one, 1) for one in psutil.getloadavg()]
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "cores": psutil.cpu_count(),
            "load_before": load,
        }
        print(
            json.dumps(
                {**facts, "cpu": machine().host.cpu, "torch": torch.__version__, **vars(options)}
            ),
            flush=True,
        )
        for number in (1, 2, 4):
            print(json.dumps(run(folder, number, options)), flush=True)


if __name__ == "__main__":
    main()
