"""`train_many`: one plan, many data sets or rates, each trained in a process of its own on its
own device.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from autotune import training
from autotune.api.options import require_known, require_optimizer
from autotune.api.runs import measure_predicted, plan_here
from autotune.errors import InvalidInput, Preempted
from autotune.hardware import probe
from autotune.runtime import QueuedCommand, make_scratch_folder, run_queue, started_by_launcher
from autotune.schema import (
    SUBJECT_LOG,
    DataPlace,
    HardwareProfile,
    JobOverrides,
    Notice,
    OnEvent,
    StatusChanged,
    Subject,
    SubjectRun,
    TrainingPlan,
    as_job_data,
    each_place,
    find_subject,
    ignore_event,
    load_subjects,
    with_job,
    write_plan,
)
from autotune.training import (
    finished_as_planned,
    hardware_misfits,
    is_in_use,
    read_report,
    require_fit,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"
MAX_ERROR_BYTES = 1 << 16
"""Bytes at the end of a log that are searched for the error that it ends with."""


def subject_job(
    plan: TrainingPlan | str | Path, over: str | Path, subject: str, output: str = ""
) -> dict[str, Any]:
    """The arguments with which `train` trains one subject of a file: for a task of an array.

    Args:
        plan: the plan, or its file.
        over: the file that lists the subjects.
        subject: its name, or its number from 1.
        output: folder in which each has one of its own; the plan's by default.

    Raises:
        InvalidPlan, InvalidInput: plan or file are not valid, or there is no such subject.

    Example:
        >>> autotune.train("plan.yaml", **autotune.subject_job("plan.yaml", "subjects.yaml", "3"))
    """
    chosen = plan if isinstance(plan, TrainingPlan) else plan_here(Path(plan))[0]
    one = find_subject(load_subjects(over), subject)
    return {**one.job, "output": one.plan(with_job(chosen, output=output or None)).job.output}


def train_many(
    plan: TrainingPlan | str | Path,
    over: str | Path | Sequence[Subject],
    *,
    model: str | None = None,
    data: DataPlace | None = None,
    optimizer: str | None = None,
    on_event: OnEvent = ignore_event,
    **job: Unpack[JobOverrides],
) -> tuple[SubjectRun, ...]:
    """Train one plan over many subjects: as many at once as this machine has GPUs for, on a CPU one
    after the other.

    Called again it goes on: what is done is recognized, and what was interrupted is resumed. A run
    that fails does not stop the others. A predicted plan is tried once on this machine first, as by
    `train`.

    Args:
        plan: a plan for this machine alone, or its file.
        over: file that lists the subjects, or the subjects.
        model: as for `train`.
        data: data folder of subjects that name none.
        optimizer: as for `train`.
        on_event: listener to progress.
        job: fields of the plan's job to replace; what a subject says counts more. Each has a folder
            in `output`, and beside it a log.

    Raises:
        InvalidPlan: the file is not a valid plan, or a value of a job is out of range.
        DoesNotFit: the plan was made for another machine.
        InvalidInput: the subjects cannot be read, or the plan is for several machines.
        Preempted: a signal came; those that ran have written a checkpoint.

    Example:
        >>> for run in autotune.train_many("plan.yaml", "subjects.yaml"):
        ...     print(run.name, run.report.final_loss if run.report else run.error)
    """
    require_known(job, JobOverrides.__annotations__, "argument of train_many")
    subjects = tuple(over) if not isinstance(over, str | Path) else load_subjects(over)
    given, file = (plan, None) if isinstance(plan, TrainingPlan) else plan_here(Path(plan))
    require_optimizer(given, optimizer)  # processes that are started inherit it
    common = with_job(given, model=model, data=None if data is None else as_job_data(data), **job)
    for subject in subjects:
        subject.plan(common)  # so that a wrong value is told before any work
    _require_one_machine(common)
    on_event(StatusChanged(text="reading the machine"))
    hardware = probe()
    common = measure_predicted(training.fetch_weights(common, hardware), hardware, file, on_event)
    return _run_all(
        [subject.plan(common) for subject in subjects], find_places(common, hardware), on_event
    )


def find_places(plan: TrainingPlan, hardware: HardwareProfile) -> list[dict[str, str]]:
    """For each run that can go at once, the environment that gives it GPUs of its own; without GPUs
    only one can.

    Raises:
        DoesNotFit: not even one run has GPUs that suit the plan.
    """
    device, number = hardware.device, plan.frozen.hardware.num_processes
    if device.kind != "cuda" or plan.frozen.caching.other_gpu:
        return [{}]
    cards = [
        hardware if index == device.index else probe(index=index) for index in range(device.count)
    ]
    misfits = {card.device.index: hardware_misfits(plan, card) for card in cards}
    fitting = [index for index, why in misfits.items() if not why]
    if len(fitting) < number:
        require_fit(tuple(why for each in misfits.values() for why in each))
    if (needed := (plan.frozen.expected.host_memory_bytes or 0) * number) > 0:
        fitting = fitting[: number * max(1, hardware.host.available_memory_bytes // needed)]
    names = (os.environ.get(VISIBLE) or ",".join(map(str, range(device.count)))).split(",")
    groups = [
        fitting[first : first + number] for first in range(0, len(fitting) - number + 1, number)
    ]
    return [{VISIBLE: ",".join(names[index] for index in group)} for group in groups] or [{}]


def _require_one_machine(plan: TrainingPlan) -> None:
    if plan.frozen.hardware.num_nodes > 1 or started_by_launcher():
        raise InvalidInput(
            "several machines, or processes of a launcher, cannot share a queue of runs",
            hint=(
                "write an array of jobs: autotune job-script PLAN --over FILE --for slurm; or "
                "train one: --subject K"
            ),
        )


def _run_all(
    plans: Sequence[TrainingPlan], places: Sequence[Mapping[str, str]], on_event: OnEvent
) -> tuple[SubjectRun, ...]:
    named = {Path(plan.job.output).name: plan for plan in plans}
    runs = {
        name: SubjectRun(name=name, output=plan.job.output, report=finished_as_planned(plan))
        for name, plan in named.items()
    }
    waiting = [name for name, run in runs.items() if run.report is None]
    done = len(runs) - len(waiting)
    on_event(Notice(text=f"{len(runs)} runs, {done} of them done; {len(places)} at a time"))
    for name in waiting:  # told now: its turn may come after hours
        for place in each_place(named[name].job.data or ()):
            if not Path(place).exists():
                on_event(Notice(text=f"{name}: there is no data at {place} yet", level="warning"))

    def tell_start(command: QueuedCommand, place: Mapping[str, str]) -> None:
        where = f" on GPU {place[VISIBLE]}" if VISIBLE in place else ""
        on_event(Notice(text=f"{command.name}: training{where}; its progress is in {command.log}"))

    def tell_end(command: QueuedCommand, status: int) -> None:
        run = runs[command.name] = _outcome(named[command.name], command, status)
        on_event(
            Notice(
                text=f"{run.name}: {run.error or 'done'}", level="warning" if run.error else "note"
            )
        )

    with make_scratch_folder("many") as folder:
        commands = [_command(name, named[name], Path(folder), on_event) for name in waiting]
        signal = run_queue(commands, places, tell_start, tell_end)
    if signal:
        done = sum(run.report is not None for run in runs.values())
        raise Preempted(
            f"stopped by {signal}: {done} of {len(runs)} runs are done, those that ran have "
            "written a checkpoint",
            hint="run the same command again to continue",
        )
    return tuple(runs.values())


def _command(name: str, plan: TrainingPlan, folder: Path, on_event: OnEvent) -> QueuedCommand:
    output, file = Path(plan.job.output), folder / f"{name}.yaml"
    write_plan(file, plan)
    told: list[str] = []

    def is_free() -> bool:
        if is_free_now := not is_in_use(output):
            return True
        if not told:
            told.append(name)
            on_event(Notice(text=f"{name}: waiting for another process that writes to {output}"))
        return is_free_now

    arguments = (sys.executable, "-m", "autotune", "train", str(file), "--resume")
    return QueuedCommand(name, arguments, output.with_name(name + SUBJECT_LOG), is_free)


def _outcome(plan: TrainingPlan, command: QueuedCommand, status: int) -> SubjectRun:
    report, error = None, None
    if status == Preempted.exit_status:
        error = "it was stopped and has written a checkpoint: the same command resumes it"
    elif status:
        ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        error = _last_error(command.log) if status > 0 else None
        error = error or f"{ended}; see {command.log}"
    elif (report := read_report(Path(plan.job.output))) is None:
        error = f"it left no report; see {command.log}"
    return SubjectRun(name=command.name, output=plan.job.output, report=report, error=error)


def _last_error(log: Path) -> str | None:
    """The error that a command's log ends with; None if it ends with something else."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_ERROR_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    found = [line.removeprefix("error: ") for line in lines[-2:] if line.startswith("error: ")]
    return found[0] if found else None
