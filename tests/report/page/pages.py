"""Subjects of a page: golden plans, and a run of one of them that never was."""

from pathlib import Path

from autotune.events import StepFinished
from autotune.plan.candidate import PhasePeak
from autotune.plan.file import load_plan, with_job
from autotune.plan.plan import AdapterVerdict, RunReport, TrainingPlan
from autotune.report.page import Picture, Subject

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


def golden_plan(name: str = "wall") -> TrainingPlan:
    return load_plan(FOLDER / f"{name}.yaml")


def plan_subject(name: str = "wall") -> Subject:
    return Subject(f"{name}.yaml", golden_plan(name))


def steps_of(number: int, num_steps: int = 100) -> list[StepFinished]:
    """Steps whose loss falls, each of a second, the eleventh of ten."""
    return [
        StepFinished(
            step=step, num_steps=num_steps, loss=1 / step**0.5, learning_rate=1e-4,
            gradient_norm=0.1, seconds=10.0 if step == 11 else 1.0, data_seconds=0.01,
            images_per_second=2.0, memory_bytes=9 * GIB,
            remaining_seconds=float(num_steps - step) or None,
        )
        for step in range(1, number + 1)
    ]  # fmt: skip


def run_report(plan: TrainingPlan) -> RunReport:
    phases = tuple(
        PhasePeak(name=name, seconds=1.0, device_bytes=size * GIB, host_bytes=GIB)
        for name, size in (("loading", 5), ("training", 9), ("saving", 4))
    )
    return RunReport(
        plan_digest=plan.digest,
        num_steps=100,
        total_seconds=123.0,
        expected_step_seconds=plan.frozen.expected.step_seconds,
        measured_step_seconds=1.1,
        expected_peak_memory_bytes=plan.frozen.expected.peak_memory_bytes,
        measured_peak_memory_bytes=9 * GIB,
        expected_phases=phases,
        phases=phases,
        images_per_second=2.0,
        first_loss=1.0,
        final_loss=0.1,
        warnings=("memory is at 9 GiB",),
        settings=plan.frozen.settings,
        verdict=AdapterVerdict(
            num_layers=2, num_unmoved=0, num_not_finite=0, layer_norms={"a": 1.0, "b": 2.0},
            base_loss=0.5,
            adapter_loss=0.25,
        ),
        adapter="pytorch_lora_weights.safetensors",
    )  # fmt: skip


def run_subject(*, finished: bool = True, prompt: str = "a red heart") -> Subject:
    plan = with_job(golden_plan(), preview_prompts=(prompt,))
    picture = Picture(f"data:image/png;base64,{PIXEL}", 1, 1)
    return Subject(
        name="first-run", is_run=True, plan=plan, steps=steps_of(100 if finished else 40),
        report=run_report(plan) if finished else None,
        previews=tuple((0, step, picture) for step in (25, 50)),
        comparisons=((prompt, picture, picture),) if finished else (),
    )  # fmt: skip
