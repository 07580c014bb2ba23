"""`autotune plan` and `autotune train` of 12 blocks of full width on synthetic images, as a user
calls them: promise and reality, flat memory; killed without warning, stopped by a signal, and
resumed both times."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evidence import Evidence, begin, precision_of, workload_of
from pipeline import FAMILY, write_pipeline
from search import plan, plan_command

from autotune.machine.probe import cached_profile
from autotune.train.folder import REPORT_FILE
from autotune.train.metrics import METRICS_FILE, read_metrics

CHECKPOINT_EVERY = 5


def write_images(folder: Path, side_px: int, count: int = 12) -> None:
    """Noise in captioned PNG files."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(
            0, 255, (side_px, side_px, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(
            "a red square" if number % 2 else "a blue circle on the left"
        )


def train(
    evidence: Evidence,
    plan: Path,
    output: Path,
    num_steps: int,
    *,
    after: int,
    how: signal.Signals | None,
    resume: bool,
) -> None:
    """One start of the run; sends `how` once `after` steps are recorded."""
    log = evidence.folder / "train.log"
    started = time.monotonic()
    with log.open("a") as file:
        command = [sys.executable, "-m", "autotune", "train", str(plan), "--output", str(output),
        "--json",
                   "--steps", str(num_steps), *(["--resume"] * resume)]  # fmt: skip
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        while process.poll() is None and evidence.left() > 5:
            if how is not None and len([*read_metrics(output / METRICS_FILE)]) >= after:
                process.send_signal(how)
                break
            time.sleep(0.5)
        try:
            status = process.wait(timeout=max(5.0, evidence.left()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = None
    tail = log.read_text()[-300:] if status else ""
    evidence.row("start", resumed=resume, sent=how.name if how else None, status=status, log=tail,
                 seconds=time.monotonic() - started,
                 recorded_steps=len([*read_metrics(output / METRICS_FILE)]))  # fmt: skip


def main() -> None:
    """Measure the part."""
    evidence = begin("run", __doc__)
    hardware = cached_profile()
    plain = workload_of(evidence.model(FAMILY), evidence.size(1024), rank=16, batch=2)
    model = write_pipeline(evidence, hardware, plain, precision_of(hardware))
    images, plan_file, output = (
        evidence.scratch() / name for name in ("images", "plan.yaml", "trained")
    )
    write_images(images, evidence.size(1024))
    shutil.rmtree(output, ignore_errors=True)  # of an earlier call with this SCRATCH
    made: Any = plan(evidence, plan_command(evidence, model, 16, 2, 90, "--data", str(images),
    "--max-trials", "3"),
                     share_of_time=0.5)  # fmt: skip
    if made is None:
        return
    text = re.sub(
        r"checkpointing_steps: \d+",
        f"checkpointing_steps: {CHECKPOINT_EVERY}",
        plan_file.read_text(),
    )
    text = re.sub(
        r"report_to: \w+", "report_to: none", text
    )  # tensorboard may not be there; metrics.jsonl is
    plan_file.write_text(re.sub(r"preview_every: \d+", "preview_every: 0", text))
    expected = made["frozen"]["expected"]
    beside = sum(phase["seconds"] for phase in expected["phases"] if phase["name"] != "training")
    affordable = (evidence.left() - 3 * max(50.0, 25 + beside)) / expected[
        "step_seconds"
    ]  # of three starts
    num_steps = 30 if evidence.small else int(max(20, min(2000, affordable)))
    third = max(CHECKPOINT_EVERY + 2, num_steps // 3)
    train(evidence, plan_file, output, num_steps, after=third, how=signal.SIGKILL, resume=False)
    train(evidence, plan_file, output, num_steps, after=2 * third, how=signal.SIGTERM, resume=True)
    train(evidence, plan_file, output, num_steps, after=0, how=None, resume=True)
    steps = [*read_metrics(output / METRICS_FILE)]
    evidence.row("steps", seconds=[step.seconds for step in steps],
    losses=[step.loss for step in steps],
                 memory_bytes=[step.memory_bytes for step in steps])  # fmt: skip
    if not (path := output / REPORT_FILE).exists():
        evidence.row("error", what="training", message="no report: see how the last start ended")
        return
    report = json.loads(path.read_text())
    evidence.row("report", report=report)
    promised = {phase["name"]: phase for phase in report["expected_phases"]}
    for phase in report["phases"]:
        evidence.row("phase", **phase, expected=promised.get(phase["name"]))


if __name__ == "__main__":
    main()
