"""`report`: one HTML page about plans, records and runs. Reading needs neither torch nor a
machine.
"""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.api.records import find_record
from autotune.api.run_pictures import read_comparisons, read_previews
from autotune.errors import AutotuneError, InvalidInput, InvalidPlan, first_line
from autotune.reporting import PAGE_FILE, PlanSubject, RunSubject, Subject, build_page, has_plotly
from autotune.runtime import __version__, read_bounded, write_text_atomic
from autotune.schema import (
    RUN_PLAN_FILE,
    Event,
    Notice,
    OnEvent,
    PreviewsWritten,
    RunReport,
    StepFinished,
    TrainingPlan,
    load_variants,
    read_plan,
)
from autotune.sharing import MAX_RECORD_BYTES, Record, name_of, parse_record
from autotune.training import METRICS_FILE, REPORT_FILE, read_metrics

MAX_PAGE_BYTES = 8 << 20
MAX_METRICS_BYTES = 64 << 20
"""Some 200,000 steps."""
MAX_REPORT_BYTES = 8 << 20
MAX_SUBJECTS = 8
MAX_STEP = 10**9
PICTURE_BYTES = 3 << 19
"""Encoded pictures of all runs on a page, of which plotly takes 4.8 MB."""
PAGE_SHARE = 0.01
"""Share of a run's time that may go into pages of the run as it stands; the page at its end
comes on top.
"""
RECORD_NAME = re.compile(r"[0-9a-fA-F]{4,64}")


def report(*subjects: str | Path | TrainingPlan, path: str | Path | None = None) -> Path:
    """Write one HTML page about plans, runs or records: it opens from disk and asks for nothing
    from a network.

    Args:
        subjects: plan files or plans, output folders of runs, and files or names of shared records.
            Several are shown side by side.
        path: where to write it; by default `report.html` in the folder of a single run, else in
            this folder.

    Returns:
        the file.

    Raises:
        InvalidInput: the extra `report` is not installed, nothing is named, something is neither of
            the three, or the page cannot be written, or only in place of what it shows or of
            another file of a run.
        InvalidPlan: a file is no valid plan.

    Example:
        >>> autotune.report("plan.yaml")
        >>> autotune.report("first-run", "second-run", path="compared.html")
    """
    if not 1 <= len(subjects) <= MAX_SUBJECTS:
        raise InvalidInput(
            f"a report shows 1 to {MAX_SUBJECTS} plans, runs or records, not {len(subjects)}",
            hint="name a plan file, the output folder of a run, or a record",
        )
    only = (
        Path(subjects[0])
        if len(subjects) == 1 and not isinstance(subjects[0], TrainingPlan)
        else None
    )
    target = (
        Path(path) if path is not None else (only if only and only.is_dir() else Path()) / PAGE_FILE
    )
    _require_free(target, subjects)
    found = [
        one for each in subjects for one in _read_subject(each, PICTURE_BYTES // len(subjects))
    ]
    if len(found) > MAX_SUBJECTS:
        raise InvalidInput(
            f"a report shows at most {MAX_SUBJECTS} plans, and these files hold {len(found)}",
            hint="name fewer, or make a plan with fewer --hardware",
        )
    try:
        page = build_page(found, __version__)
    except (ArithmeticError, ValueError) as error:
        message = f"a file holds impossible numbers: {first_line(error)}"
        raise InvalidInput(message, hint="copy the file again from where it was made") from error
    if len(page.encode()) > MAX_PAGE_BYTES:
        raise InvalidInput("the page would be over 8 MiB", hint="show fewer at once")
    try:
        write_text_atomic(target, page)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {target}: {error.strerror}", hint="write it elsewhere: -o FILE"
        ) from error
    return target


def _require_free(target: Path, subjects: Sequence[str | Path | TrainingPlan]) -> None:
    """Raise InvalidInput if the page would replace one of the subjects, or a file of a run that
    is no page.
    """
    hint = "write it elsewhere: -o FILE.html"
    for path in (Path(subject) for subject in subjects if not isinstance(subject, TrainingPlan)):
        if path.is_file() and target.exists() and target.samefile(path):
            raise InvalidInput(f"the page would replace {path}, which it shows", hint=hint)
    if target.suffix.lower() not in (".html", ".htm") and (folder := _folder_of_run(target)):
        raise InvalidInput(f"{target} is one of the files of the run in {folder}", hint=hint)


def _folder_of_run(file: Path) -> Path | None:
    """The output folder in which this file lies, at whatever depth; None if it lies in none."""
    return next(
        (folder for folder in file.absolute().parents if (folder / RUN_PLAN_FILE).is_file()), None
    )


def _read_subject(subject: str | Path | TrainingPlan, picture_bytes: int) -> list[Subject]:
    """What the page shows of it: of a plan file with variants each of them."""
    if isinstance(subject, TrainingPlan):
        return [PlanSubject.of_plan("plan", subject)]
    path = Path(subject)
    if path.is_dir():
        return [read_run(path, picture_bytes)]
    if path.is_file():
        return _read_file(path)
    if RECORD_NAME.fullmatch(str(subject)):
        name, record = find_record(str(subject))
        return [_record_subject(name[:12], record)]
    raise InvalidInput(
        f"there is neither a plan, a run's folder nor a record at {path}",
        hint=(
            "name a plan file, the output folder of `autotune train`, or a record of `autotune "
            "profiles list`"
        ),
    )


def _read_file(path: Path) -> list[Subject]:
    try:
        if path.suffix == ".json":
            return [_read_record_file(path)]
        plans = load_variants(path)
    except AutotuneError as error:
        if path.suffix not in (".yaml", ".yml") and (folder := _folder_of_run(path)):
            raise InvalidInput(
                f"{path} is a file inside a run, not a run",
                hint=f"name the run's folder: autotune report {shlex.quote(str(folder))}",
            ) from error
        if path.suffix == ".json":
            raise InvalidInput(
                error.message, hint="name a plan file, the output folder of a run, or a record"
            ) from error
        raise
    if len(plans) == 1:
        return [PlanSubject.of_plan(path.name, plans[0])]
    return [
        PlanSubject.of_plan(f"{path.name}, {plan.frozen.hardware.device_name}", plan)
        for plan in plans
    ]


def _read_record_file(path: Path) -> PlanSubject:
    try:
        content = read_bounded(path, MAX_RECORD_BYTES)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror}", hint="name the file of a record"
        ) from error
    name = path.stem if re.fullmatch("[0-9a-f]{64}", path.stem) else name_of(content)
    return _record_subject(path.name[:24], parse_record(content, name))


def _record_subject(name: str, record: Record) -> PlanSubject:
    return PlanSubject(
        name=name,
        kind="record",
        device_name=record.machine.device_name,
        num_processes=1,
        budget_bytes=record.machine.budget_bytes,
        workload=record.workload,
        settings=record.settings,
        expected=record.expected,
        trials=record.trials,
        residuals=record.calibration,
        search_seconds=record.search_seconds,
    )


def read_run(folder: Path, picture_bytes: int = PICTURE_BYTES) -> RunSubject:
    """What the output folder of a run holds, as far as it can be read.

    Raises:
        InvalidInput: it is not the folder of a run.
    """
    try:
        plan = read_plan(folder / RUN_PLAN_FILE)
    except InvalidPlan as error:
        if (folder / RUN_PLAN_FILE).exists():
            raise
        hint = "name the folder that `autotune train` writes to"
        raise InvalidInput(
            f"{folder} is not the output folder of a run: it has no {RUN_PLAN_FILE}", hint=hint
        ) from error
    notes: list[str] = []
    previews = read_previews(folder, 2 * picture_bytes // 3, notes)
    comparisons = read_comparisons(folder, plan.job.preview_prompts, picture_bytes // 3, notes)
    return RunSubject(
        name=folder.resolve().name,
        plan=plan,
        steps=_read_steps(folder / METRICS_FILE, notes),
        report=_read_report(folder / REPORT_FILE, notes),
        previews=previews,
        comparisons=comparisons,
        notes=tuple(notes),
    )


def _read_steps(path: Path, notes: list[str]) -> Sequence[StepFinished]:
    if path.is_file() and path.stat().st_size > MAX_METRICS_BYTES:
        notes.append(f"{path.name} is over {MAX_METRICS_BYTES >> 20} MiB and was left out.")
        return []
    steps = read_metrics(path, notes.append)
    possible = [
        step for step in steps if 0 < step.step <= MAX_STEP and 0 < step.num_steps <= MAX_STEP
    ]
    possible = [step for step in possible if step.seconds > 0]
    if number := len(steps) - len(possible):
        notes.append(
            f"{path.name} holds {number} steps with impossible numbers, which were left out."
        )
    return possible


def _read_report(path: Path, notes: list[str]) -> RunReport | None:
    try:
        return RunReport.model_validate_json(read_bounded(path, MAX_REPORT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        notes.append(f"{path.name} cannot be read.")
        return None


class RunPage:
    """Keeps the page of a run up to date while it trains: a listener to its events. A failure never
    costs the run.

    A page of many steps takes seconds, in which the run waits, so pages together take `PAGE_SHARE`
    of its time.
    """

    def __init__(
        self, folder: Path, on_event: OnEvent, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.on_event, self.clock = folder, on_event, clock
        self.has_trained = False
        self.next_at = clock()
        if not has_plotly():
            install = (
                "plotly, which draws it, is not installed: pip install 'lora-autotune[report]'"
            )
            on_event(Notice(text=f"no {PAGE_FILE}: {install}", level="warning"))

    def __call__(self, event: Event) -> None:
        """Pass the event on; after previews write the page anew, unless it was just written."""
        self.on_event(event)
        self.has_trained = self.has_trained or isinstance(event, StepFinished)
        if isinstance(event, PreviewsWritten) and (started_at := self.clock()) >= self.next_at:
            self.write()
            ended_at = self.clock()
            self.next_at = ended_at + (ended_at - started_at) / PAGE_SHARE

    def write(self) -> None:
        """Write the page; if that fails tell why, but of missing plotly it was told at the
        start.
        """
        if not has_plotly():
            return
        try:
            report(self.folder, path=self.folder / PAGE_FILE)
        except (
            Exception
        ) as error:  # whatever a file in the folder holds, the run is worth more than its page
            self.on_event(Notice(text=f"no {PAGE_FILE}: {first_line(error)}", level="warning"))
