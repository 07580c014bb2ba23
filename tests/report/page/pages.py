"""Subjects of a page: golden plans, and a run of one of them that never was."""

import json
from pathlib import Path

from autotune.events import StepFinished
from autotune.plan.file import load_plan, with_job
from autotune.plan.plan import RunReport
from autotune.report.page import Picture, Subject
from autotune.train.metrics import Steps

FOLDER = Path(__file__).parents[2] / "search/golden"

GIB = 2**30
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR4nGP4z8DwHwAFAAH/VscvDQAAAABJRU5ErkJggg=="
)
HOSTILE = (
    "</title><script>window.hacked = 1</script>\"'><img src=x "
    "onerror=window.hacked=1>&amp;\u202e\x00"
)


def golden_plan(name="wall"):
    return load_plan(FOLDER / f"{name}.yaml")


def plan_subject():
    return Subject("wall.yaml", golden_plan())


def steps_of(number, num_steps=100):
    """Steps whose loss falls, each of a second, the eleventh of ten."""
    return [
        StepFinished(
            step=step,
            num_steps=num_steps,
            loss=1 / step**0.5,
            learning_rate=1e-4,
            gradient_norm=0.1,
            seconds=10.0 if step == 11 else 1.0,
            data_seconds=0.01,
            images_per_second=2.0,
            memory_bytes=9 * GIB,
            remaining_seconds=float(num_steps - step) or None,
        )
        for step in range(1, number + 1)
    ]


def run_report(plan):
    told = json.loads((Path(__file__).parent / "run.json").read_text())
    expected = {
        "plan_digest": plan.digest,
        "expected_step_seconds": plan.frozen.expected.step_seconds,
        "expected_peak_memory_bytes": plan.frozen.expected.peak_memory_bytes,
        "expected_phases": told["phases"],
        "settings": plan.frozen.settings,
    }
    return RunReport.model_validate({**told, **expected}, strict=False)


def run_subject(*, finished=True, prompt="a red heart"):
    plan = with_job(golden_plan(), preview_prompts=(prompt,))
    picture = Picture(f"data:image/png;base64,{PIXEL}", 1, 1)
    return Subject(
        name="first-run",
        is_run=True,
        plan=plan,
        steps=Steps.of(steps_of(100 if finished else 40)),
        report=run_report(plan) if finished else None,
        previews=tuple((0, step, picture) for step in (25, 50)),
        comparisons=((prompt, picture, picture),) if finished else (),
    )
