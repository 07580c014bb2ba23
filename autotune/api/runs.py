"""`train` and `sample`: run a plan, and look at what came of it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from autotune.api.options import require_known
from autotune.api.plan_files import load_plan
from autotune.api.reports import RunPage
from autotune.families import is_on_hub
from autotune.hardware import lock_for_run
from autotune.hardware import probe as read_machine
from autotune.runtime import cache_path, ignore_other_launchers, silence_progress_bars, started_by_launcher
from autotune.schema import (
    HardwareProfile,
    JobOverrides,
    Notice,
    OnEvent,
    RunReport,
    RunStarted,
    StatusChanged,
    TrainingPlan,
    ignore_event,
    read_variants,
    with_job,
)
from autotune.training import SampleRequest, check_inputs, fetch_weights, prepare, sample_run, train_in_processes
from autotune.training import train as train_in_process

ENCODED = "encoded"
"""Folder of the user's cache that holds encoded captions and images."""


def train(
    plan: TrainingPlan | str | Path,
    *,
    model: str | None = None,
    data: str | Path | None = None,
    resume: bool = False,
    trace: bool = False,
    on_event: OnEvent = ignore_event,
    **job: Unpack[JobOverrides],
) -> RunReport:
    """Train exactly what a plan says, in as many processes as it says.

    A predicted plan is tried once on this machine first; the measured plan is written beside its file.

    Args:
        plan: a plan, or its file.
        model: another folder or hub id of the same architecture.
        data: another data folder.
        resume: go on from the newest checkpoint, if there is one.
        trace: write a profile of a few steps to `trace.json` in the output folder.
        on_event: listener to progress.
        job: fields of the plan's job to replace, e.g. `output="other"`.

    Raises:
        InvalidPlan: the file is not a valid plan, or a value of the job is out of range.
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: model or data cannot be used, or the output folder belongs to another run.
        Preempted: a signal came; a checkpoint is written.
        AutotuneError: memory or disk ran out, the loss is no longer finite, or a search uses the device.

    Example:
        >>> report = autotune.train("plan.yaml", output="first-run")
        >>> report.final_loss, report.images_per_second
    """
    require_known(job, JobOverrides.__annotations__, "argument of train")
    changes: dict[str, Any] = {"model": model, "data": None if data is None else str(data), **job}
    given, file = (plan, None) if isinstance(plan, TrainingPlan) else _plan_here(Path(plan))
    chosen = with_job(given, **changes)
    on_event(StatusChanged(text="reading the machine"))
    ignore_other_launchers()
    silence_progress_bars()
    hardware = read_machine()
    is_predicted = chosen.frozen.expected.evidence == "predicted"
    if is_predicted or is_on_hub(chosen.job.model):  # else there is no long work yet
        check_inputs(chosen, resume=resume)
    chosen = fetch_weights(chosen, hardware)
    if is_predicted:
        from autotune.planning import measured_here  # not for every run: the search's libraries take 14 MiB

        chosen = measured_here(chosen, hardware, file, on_event)
    number = chosen.frozen.hardware.num_processes
    on_event(RunStarted(plan=chosen))
    page = RunPage(Path(chosen.job.output), on_event)
    with lock_for_run(hardware.device, number, lambda text: on_event(Notice(text=text))):
        report = _train(chosen, hardware, page, resume=resume, trace=trace)
    if page.has_trained:  # of several processes only the first tells of steps
        page.write()
    return report


def _plan_here(file: Path) -> tuple[TrainingPlan, Path]:
    """The plan of a file for this machine, and the file beside which it is written once it is measured."""
    if len(read_variants(file)) == 1:
        return load_plan(file), file
    chosen = load_plan(file)
    device = re.sub(r"[^a-z0-9]+", "-", chosen.frozen.hardware.device_name.lower()).strip("-")
    return chosen, file.with_stem(f"{file.stem}-{device[:60]}")


def _train(plan: TrainingPlan, hardware: HardwareProfile, on_event: OnEvent, *, resume: bool, trace: bool) -> RunReport:
    cache = cache_path(ENCODED)
    if plan.frozen.hardware.num_processes == 1 or started_by_launcher():
        return train_in_process(plan, hardware, cache, on_event, resume=resume, trace=trace)
    prepare(plan, hardware, resume=resume).lock.release()  # so that what is wrong is said once, before any starts
    return train_in_processes(plan, cache, on_event, resume=resume, trace=trace)


def sample(
    run: str | Path,
    prompt: str,
    *,
    count: int = 1,
    seed: int = 0,
    num_steps: int | None = None,
    control: Sequence[str | Path] = (),
    path: str | Path | None = None,
    on_event: OnEvent = ignore_event,
) -> list[Path]:
    """Sample pictures from a trained adapter through the model's stock pipeline; returns the files.

    Args:
        run: output folder of a training run.
        prompt: what to show.
        count: number of pictures, each from another seed.
        seed: seed of the first picture.
        num_steps: denoising steps; the job's by default.
        control: control images, for edit models.
        path: PNG file to write, with a number added if there are several; in `run` by default.
        on_event: listener to progress.

    Raises:
        InvalidInput: the folder holds no trained adapter, or control images do not suit the model.
        AutotuneError: memory ran out.

    Example:
        >>> autotune.sample("first-run", "a photo of sks dog in the snow", count=2)
    """
    silence_progress_bars()
    on_event(StatusChanged(text="sampling"))
    wanted = SampleRequest(
        prompt, count, seed, num_steps, tuple(map(Path, control)), None if path is None else Path(path)
    )
    return sample_run(Path(run), read_machine(), wanted, cache_path(ENCODED), on_event)
