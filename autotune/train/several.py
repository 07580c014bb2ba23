"""Trains a plan in several processes of this machine: starts them, passes on the first one's events, gives its report.

What the first process here tells comes through a pipe: see `process.py`.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.events import OnEvent, parse_event
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import write_plan
from autotune.plan.run import RunReport
from autotune.system.failures import error_from
from autotune.system.files import make_scratch_folder
from autotune.system.process import launch
from autotune.train.files import checkpoints_of

REPORT = '{"report": '
"""How the last line in the pipe begins when the run has ended well."""


class ProcessFailed(AutotuneError):
    """One of several training processes ended without saying why."""

    def __init__(self, message: str, *, hint: str, exit_status: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


def train_in_processes(
    plan: TrainingPlan, cache_folder: Path, on_event: OnEvent, *, resume: bool, trace: bool
) -> RunReport:
    """Train in as many processes of this machine as the plan says.

    Raises:
        AutotuneError: as `train`; or a process died, whose exit status the error then has.
    """
    output = Path(plan.job.output)
    with make_scratch_folder("run") as folder:
        plan_file, pipe = Path(folder) / "plan.yaml", Path(folder) / "events"
        write_plan(plan_file, plan)
        os.mkfifo(pipe)
        failures: list[AutotuneError] = []
        reports: list[RunReport] = []
        reader = threading.Thread(
            target=_pass_on, args=(pipe, on_event, failures.append, reports.append), daemon=True
        )
        reader.start()
        flags = (*(["--resume"] if resume else []), *(["--trace"] if trace else []))
        arguments = (
            "-m",
            "autotune.train.process",
            str(plan_file),
            str(pipe),
            str(cache_folder),
            *flags,
        )
        try:
            number = plan.frozen.hardware.num_processes
            status = launch(number, arguments, lambda: checkpoints_of(output))
        finally:
            with contextlib.suppress(
                OSError
            ):  # so that a reader whom nobody wrote to comes to its end
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            reader.join()
    if failures:
        raise failures[0]
    if status or not reports:
        raise ProcessFailed(
            f"a training process ended with status {status}",
            hint="what it printed is above; go on from the last checkpoint with --resume",
            exit_status=status or 1,
        )
    return reports[0]


def report_line(report: RunReport) -> str:
    """The report as the last line in the pipe."""
    return f"{REPORT}{report.model_dump_json()}}}"


def _pass_on(
    pipe: Path,
    on_event: OnEvent,
    on_failure: Callable[[AutotuneError], None],
    on_report: Callable[[RunReport], None],
) -> None:
    with pipe.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(REPORT):
                on_report(RunReport.model_validate_json(line.strip()[len(REPORT) : -1]))
            elif error := error_from(line):
                on_failure(error)
            else:
                on_event(parse_event(line))
