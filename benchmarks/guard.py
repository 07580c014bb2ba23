"""Whether training on a CPU ends in good order when memory runs out: in a memory cgroup (v1, root), 20 times.

Another process of the group takes memory steadily, as a leak does. Counted are runs that ended with status 1, a
checkpoint and the message, and whether the group's limit was ever met (a kill by the system, or a refused charge).

    PYTHONPATH=. python benchmarks/guard.py [--runs 20] [--limit-mib 1400] [--mib-per-second 40]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.schema import write_plan
from tests.training.small import machine, make_plan, write_model_and_images

GROUPS = Path("/sys/fs/cgroup/memory")
HOG = """
import sys, time
kept = []
while True:
    kept.append(b"x" * (1 << 20) * 2)
    time.sleep(2 / float(sys.argv[1]))
"""


def in_group(group: Path, command: list[str], **options: object) -> subprocess.Popen[str]:
    """Start a command inside the group."""
    shell = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return subprocess.Popen(["sh", "-c", shell, "sh", *command], text=True, **options)  # type: ignore[call-overload]


def one_run(folder: Path, number: int, limit_bytes: int, rate: float) -> dict[str, object]:
    group = GROUPS / f"autotune-guard-{os.getpid()}-{number}"
    group.mkdir()
    output = folder / f"out-{number}"
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        train = [sys.executable, "-m", "autotune", "--progress", "none", "train", f"{folder}/plan.yaml"]
        run = in_group(group, [*train, "--output", str(output)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        while run.poll() is None and not (output / "metrics.jsonl").exists():
            time.sleep(0.05)
        hog = in_group(group, [sys.executable, "-c", HOG, str(rate)])
        _, errors = run.communicate(timeout=300)
        hog.kill()
        hog.wait()
        control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        return {
            "status": run.returncode,
            "checkpoints": sorted(path.name for path in (output / "checkpoints").glob("*.safetensors")),
            "peak_share": round(int((group / "memory.max_usage_in_bytes").read_text()) / limit_bytes, 3),
            "killed_by_system": int(control["oom_kill"]),
            "said": [line for line in errors.splitlines() if line.startswith("error")],
        }
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit-mib", type=int, default=1400)
    parser.add_argument("--mib-per-second", type=float, default=40)
    options = parser.parse_args()
    orderly = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, images = write_model_and_images(folder)
        plan = make_plan(model, images, machine(), num_steps=100_000, checkpointing_steps=0)
        write_plan(folder / "plan.yaml", plan)
        for number in range(options.runs):
            told = one_run(folder, number, options.limit_mib << 20, options.mib_per_second)
            orderly += told["status"] == 1 and bool(told["checkpoints"]) and not told["killed_by_system"]
            print(json.dumps(told), flush=True)
    print(f"{orderly} of {options.runs} ended in good order")


if __name__ == "__main__":
    main()
