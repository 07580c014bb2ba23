"""Whether training on a CPU ends in good order when memory runs out: in a memory cgroup (v1, root),
20 times.

The run keeps some memory after each step, as a leak does. Counted are runs that ended with status 1
and a checkpoint without the system killing anything in the group; `said` tells what was left.

    PYTHONPATH=. python benchmarks/guard.py [--runs 20] [--limit-mib 1000] [--mib-per-step 8]
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
LEAKING = """
import sys
import autotune
autotune.prepare_process()
kept, size = [], int(float(sys.argv[3]) * 2**20)
def leak(event):
    if isinstance(event, autotune.StepFinished):
        kept.append(b"x" * size)
try:
    autotune.train(sys.argv[1], output=sys.argv[2], on_event=leak)
except autotune.AutotuneError as error:
    sys.stderr.write(f"error: {error.message}\\n")
    sys.exit(error.exit_status)
"""


def in_group(group: Path, command: list[str], **options: object) -> subprocess.Popen[str]:
    """Start a command inside the group."""
    shell = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return subprocess.Popen(["sh", "-c", shell, "sh", *command], text=True, **options)  # type: ignore[call-overload]


def one_run(folder: Path, number: int, limit_bytes: int, mib_per_step: float) -> dict[str, object]:
    group = GROUPS / f"autotune-guard-{os.getpid()}-{number}"
    group.mkdir()
    output = folder / f"out-{number}"
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        command = [
            sys.executable,
            "-c",
            LEAKING,
            f"{folder}/plan.yaml",
            str(output),
            str(mib_per_step),
        ]
        run = in_group(group, command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        _, errors = run.communicate(timeout=600)
        control = dict(
            line.split() for line in (group / "memory.oom_control").read_text().splitlines()
        )
        return {
            "status": run.returncode,
            "checkpoints": sorted(
                path.name for path in (output / "checkpoints").glob("*.safetensors")
            ),
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
    parser.add_argument("--limit-mib", type=int, default=1000)
    parser.add_argument("--mib-per-step", type=float, default=8)
    options = parser.parse_args()
    orderly = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, images = write_model_and_images(folder)
        plan = make_plan(model, images, machine(), num_steps=100_000, checkpointing_steps=0)
        write_plan(folder / "plan.yaml", plan)
        for number in range(options.runs):
            told = one_run(folder, number, options.limit_mib << 20, options.mib_per_step)
            orderly += (
                told["status"] == 1 and bool(told["checkpoints"]) and not told["killed_by_system"]
            )
            print(json.dumps(told), flush=True)
    print(f"{orderly} of {options.runs} ended in good order")


if __name__ == "__main__":
    main()
