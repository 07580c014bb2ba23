"""What the commands show while they work: bars and rows on stderr, data on stdout, color only
where it is wanted."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from autotune import (
    CandidatesPredicted,
    Event,
    Notice,
    PhaseStarted,
    Progressed,
    RecordsMatched,
    RunStarted,
    SearchSpaceBuilt,
    StatusChanged,
    StepFinished,
    TrainingPlan,
    TrialFinished,
    TrialResult,
    TrialStarted,
)
from autotune.report.text import printable_lines, smooth, time_left_text, wrapped

QUIET_SECONDS = 60.0
"""Longest time between two lines of a training run whose output goes to a file."""


NOTE_MARGIN = 50
"""Columns that the bar of trials takes beside what is tried."""


class PlainConsole(Console):
    """Prints text as it is, without markup or control characters: some of it comes from
    untrusted files."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def print(self, *objects: Any, **style: Any) -> None:
        try:
            super().print(*objects, **style)
        except OSError:
            if not self.stderr:
                raise
            self._fall_silent()

    def on_broken_pipe(self) -> None:
        if self.stderr:
            self._fall_silent()
        else:
            super().on_broken_pipe()

    def _fall_silent(self) -> None:
        """Print nothing any more: nobody reads stderr, and that must neither end a run nor make
        it exit with 120."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable_lines(text), **style)


out, err = PlainConsole(), PlainConsole(stderr=True)


class _Count(MofNCompleteColumn):
    """`3/10` for work with a known number of parts."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class _TimeLeft(TimeRemainingColumn):
    """By the speed so far; of work whose number of parts is only a limit, at most what the event
    display says."""

    def render(self, task: Task) -> Text:
        left = task.fields["max_seconds_left"]
        return super().render(task) if left is None else Text(f"≤ {timedelta(seconds=round(left))}")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        _Count(),
        TextColumn("{task.fields[note]}", markup=False),
        _TimeLeft(compact=True),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


class EventDisplay:
    """Shows the stream of events: a bar and lines on stderr; off a terminal, lines alone."""

    def __init__(self, progress: Progress, *, every_step: bool = False) -> None:
        self.progress, self.every_step = progress, every_step
        self.task: TaskID | None = None
        self.trials: list[TrialResult] = []
        self.max_trials = 0
        self.last_line_at = time.monotonic()
        self.promised_bytes: int | None = None
        self.num_steps, self.smoothed_loss = 0, 0.0
        self.has_spoken = False

    def __call__(self, event: Event) -> None:
        """Show one event; what is not known here is not shown."""
        from autotune.report.plan import note_text, prediction_lines, records_lines, workload_lines

        match event:
            case PhaseStarted():
                self._end_task()
                self._print(event.name, style="dim")
            case StatusChanged():
                self._update(event.text, None, None, "")
            case Progressed():
                self._update(event.name, event.done, event.total, "")
            case Notice():
                warns = event.level == "warning"
                text = (
                    "\n".join(wrapped(f"warning: {event.text}", 4))
                    if warns
                    else note_text(event.text, event.topic)
                )
                self._print(text, style="yellow" if warns else None)
            case SearchSpaceBuilt():
                self.max_trials = event.max_trials
                self._print("\n".join(workload_lines(event.workload, event.num_candidates)))
            case RecordsMatched():
                self._print("\n".join(records_lines(event)), end="")
            case CandidatesPredicted():
                self._print("\n".join(prediction_lines(event.predictions, event.budget_bytes)))
            case RunStarted():
                self._start_run(event.plan)
            case TrialStarted():
                room = max(20, err.width - NOTE_MARGIN)
                label = shorten(event.candidate.label(), room, placeholder=" …")
                self._update_trials(label)
            case TrialFinished():
                self._trial(event.result)
            case StepFinished():
                self._step(event)

    def _start_run(self, plan: TrainingPlan) -> None:
        from autotune.report.page import has_plotly
        from autotune.report.plan import job_text
        from autotune.report.run import PAGE_FILE

        self.promised_bytes = plan.frozen.expected.run_memory_bytes
        self._print(f"the job        {job_text(plan)}")
        if has_plotly():
            self._print(
                f"the report     {Path(plan.job.output) / PAGE_FILE}, from the first preview on"
            )

    def _trial(self, result: TrialResult) -> None:
        from autotune.report.plan import TRIAL_HEADER, trial_lines

        if not self.trials:
            self._print(TRIAL_HEADER, style="bold")
        self.trials.append(result)
        style = None if result.outcome == "ok" else "yellow"
        self._print(
            "\n".join(trial_lines(len(self.trials), result, self.trials[0].candidate)), style=style
        )
        if result.message:
            self._print("\n".join(wrapped(f"    {result.message}")), style="dim")
        self._update_trials("")

    def _update_trials(self, note: str) -> None:
        """Beyond the limit of a search its winner is tried again, nobody knows how often."""
        done, more = len(self.trials), self.max_trials - len(self.trials)
        seconds = sum(trial.wall_seconds or 0.0 for trial in self.trials)
        left = more * seconds / done if more > 0 and seconds else None
        self._update("trials", done, self.max_trials if more > 0 else None, note, left)

    def _step(self, event: StepFinished) -> None:
        from autotune.report.run import step_text, validation_text

        self.num_steps += 1
        self.smoothed_loss = smooth(self.smoothed_loss, event.loss, self.num_steps)
        note = step_text(event, self.smoothed_loss, self.promised_bytes)
        self._update("training", event.step, event.num_steps, note)
        if held_out := validation_text(event):
            self._print(held_out)
        every = max(1, event.num_steps // 10)
        is_silent = time.monotonic() > self.last_line_at + QUIET_SECONDS
        is_due = (
            event.step % every == 0 or event.step == event.num_steps or is_silent or self.every_step
        )
        if self.progress.disable and is_due:
            self.last_line_at = time.monotonic()
            left = time_left_text(event.remaining_seconds)
            self._print(f"{event.step}/{event.num_steps}  {note}  {left}".rstrip())

    def _print(self, text: str, **style: Any) -> None:
        self.has_spoken = True
        self.progress.console.print(text, **style)

    def _update(
        self,
        name: str,
        done: int | None,
        total: int | None,
        note: str,
        max_seconds_left: float | None = None,
    ) -> None:
        shown: dict[str, Any] = {
            "description": name,
            "total": total,
            "note": note,
            "max_seconds_left": max_seconds_left,
        }
        if self.progress.disable and not self.has_spoken:
            self._print(name)  # off a terminal no bar says that something happens
        if total is None:
            self._end_task()  # rich would keep the number of parts
        if self.task is None:
            self.task = self.progress.add_task(**shown)
        self.progress.update(self.task, completed=done, **shown)

    def _end_task(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = None


@contextmanager
def show_events(*, every_step: bool = False) -> Iterator[EventDisplay]:
    """A listener for `on_event` that shows what long work tells; off a terminal, a line for
    every step if asked."""
    with _bar() as progress:
        yield EventDisplay(progress, every_step=every_step)
