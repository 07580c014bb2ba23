"""Bars and rows on stderr while commands work; color only where it is wanted."""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from autotune import events
from autotune.plan.candidate import TrialResult
from autotune.plan.plan import TrainingPlan
from autotune.report import run as texts
from autotune.report.plan import job_text
from autotune.report.text import WIDTH, folded, memory_text, printable_lines, time_left_text

QUIET_SECONDS = 60.0  # longest time between two lines of a training run whose output goes to a file


class PlainConsole(Console):
    """Prints text without markup or control characters: some comes from untrusted files. On a
    terminal lines break between words, never within one."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.width = self.width or WIDTH  # COLUMNS=0 would print nothing

    def print(self, *objects: Any, **style: Any) -> None:
        if self.is_terminal:
            objects = tuple(folded(each) if isinstance(each, str) else each for each in objects)
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
        # That nobody reads stderr must neither end a run nor make it exit with 120.
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable_lines(text), **style)


out, err = PlainConsole(), PlainConsole(stderr=True)


class _Count(progress.MofNCompleteColumn):
    def render(self, task: progress.Task) -> Text:
        return super().render(task) if task.total else Text()


class _Time(progress.TimeRemainingColumn):
    def render(self, task: progress.Task) -> Text:
        left = task.fields["max_seconds_left"]
        if left is None:
            return super().render(task) if task.total else Text(f"{task.elapsed or 0:.0f} s")
        return Text(f"≤ {timedelta(seconds=round(left))}")


class _Words(progress.TextColumn):
    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False, table_column=Column(overflow="fold"))


def _bar() -> progress.Progress:
    room = min(24, err.width - 96)  # 80 columns are needed for numbers
    return progress.Progress(
        _Words("{task.description}"),
        *[progress.BarColumn(bar_width=room)] * (room > 0),
        _Count(table_column=Column(no_wrap=True)),
        _Words("{task.fields[note]}"),
        _Time(compact=True, table_column=Column(no_wrap=True)),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


class EventDisplay:
    """Shows the stream of events: a bar and lines on stderr; off a terminal, lines alone."""

    def __init__(self, bar: progress.Progress, *, is_verbose: bool = False) -> None:
        self.bar, self.is_verbose = bar, is_verbose
        self.task: progress.TaskID | None = None
        self.trials: list[TrialResult] = []
        self.max_trials = 0
        self.last_line_at = time.monotonic()
        self.promised_bytes: int | None = None
        self.previews = Path()
        self.has_kept_promise = True
        self.num_steps, self.smoothed_loss = 0, 0.0
        self.has_spoken = False

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.PhaseStarted():
                self._start_phase(event.name)
            case events.StatusChanged():
                self._update(event.text)
            case events.Progressed():
                self._update(event.name, event.done, event.total)
            case events.Notice():
                warns, note = event.level == "warning", texts.note_text(event.text, event.topic)
                line = f"warning: {event.text}" if warns else note
                self._print(line, style="yellow" if warns else None)
            case events.SearchSpaceBuilt():
                self.max_trials = event.max_trials
                self._detail(f"{event.num_candidates} candidates")
            case events.RecordsMatched():
                self._print(*texts.records_lines(event))
            case events.RunStarted():
                self._start_run(event.plan)
            case events.TrialStarted():
                self._update_trials("" if self.trials else "the first takes longest")
            case events.TrialFinished():
                self._trial(event.result)
            case events.PreviewsWritten():
                self._print(f"previews after step {event.step} are in {self.previews}")
            case events.StepFinished():
                self._step(event)

    def _start_phase(self, name: str) -> None:
        self._end_task()
        if self.is_verbose or self.bar.disable:
            self._print(name, style="dim")
        else:
            self._update(name)

    def _start_run(self, plan: TrainingPlan) -> None:
        self.promised_bytes = plan.frozen.expected.run_memory_bytes
        from autotune.report.page import has_plotly
        from autotune.train.folder import PREVIEWS

        self.previews = Path(plan.job.output) / PREVIEWS
        self._print(f"the run        {job_text(plan)}")
        if has_plotly():
            page = Path(plan.job.output) / texts.PAGE_FILE
            self._print(f"the report     {page}, from the first preview on")

    def _trial(self, result: TrialResult) -> None:
        self.trials.append(result)
        number = len(self.trials)
        text = texts.trial_text(number, self.max_trials, result)
        self._detail(*[texts.TRIAL_HEADER] * (number == 1))
        self._detail(*texts.trial_lines(number, result, self.trials[0]))
        self._detail(*[f"    {result.message}"] * bool(result.message))
        if self.bar.disable and not self.is_verbose:
            self._print(text)
        self._update_trials(text.partition(": ")[2])

    def _update_trials(self, note: str) -> None:
        # Beyond the limit of a search its winner is tried again, nobody knows how often.
        done, more = len(self.trials), self.max_trials - len(self.trials)
        seconds = sum(trial.wall_seconds or 0.0 for trial in self.trials)
        left = more * seconds / done if more > 0 and seconds else None
        total = self.max_trials if more > 0 else None
        self._update("trial", done, total, note=note, max_seconds_left=left)

    def _step(self, event: events.StepFinished) -> None:
        self.num_steps += 1
        self.smoothed_loss = events.smooth(self.smoothed_loss, event.loss, self.num_steps)
        note = texts.step_text(event, self.smoothed_loss, self.promised_bytes)
        if self.has_kept_promise and event.memory_bytes > (self.promised_bytes or math.inf):
            self.has_kept_promise = False
            held, promised = map(memory_text, (event.memory_bytes, self.promised_bytes))
            told = f"warning: {held} are held after step {event.step}; the plan promised {promised}"
            self._print(told, style="yellow")
        self._update("step", event.step, event.num_steps, note=note)
        if held_out := texts.validation_text(event):
            self._print(held_out)
        is_tenth = event.step % max(1, event.num_steps // 10) == 0
        is_silent = time.monotonic() > self.last_line_at + QUIET_SECONDS
        is_due = is_tenth or is_silent or event.step == event.num_steps or self.is_verbose
        if self.bar.disable and is_due:
            self.last_line_at = time.monotonic()
            left = time_left_text(event.remaining_seconds)
            self._print(f"{event.step}/{event.num_steps}  {note}  {left}".rstrip())

    def _detail(self, *lines: str) -> None:
        if self.is_verbose:
            self._print(*lines)

    def _print(self, *lines: str, style: str | None = None) -> None:
        if not lines:
            return
        self.has_spoken = True
        self.bar.console.print("\n".join(lines), style=style)

    def _update(
        self, name: str, done: int | None = None, total: int | None = None, **fields: Any
    ) -> None:
        shown: dict[str, Any] = {"note": "", "max_seconds_left": None, **fields}
        shown["note"] = " ".join(shown["note"].split())
        if self.bar.disable and not self.has_spoken:
            self._print(name)  # off a terminal no bar says that something happens
        if total is None:
            self._end_task()  # rich would keep the number of parts
        if self.task is None:
            self.task = self.bar.add_task(name, total=total, **shown)
        self.bar.update(self.task, description=name, total=total, completed=done, **shown)

    def _end_task(self) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = None


@contextlib.contextmanager
def show_events(*, is_verbose: bool = False) -> Iterator[EventDisplay]:
    """Show what long work tells; verbose with tables, off a terminal with a line per step."""
    with _bar() as bar:
        yield EventDisplay(bar, is_verbose=is_verbose)
