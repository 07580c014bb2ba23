"""What the commands show while they work: bars and rows on stderr, data on stdout, color only where it is wanted."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from autotune.reporting import TRIAL_HEADER, memory_text, printable_lines, seconds_text, trial_row
from autotune.schema import Candidate, TrialResult
from autotune.training import StepEvent

QUIET_SECONDS = 60.0
"""Longest silence of a training run whose output goes to a file."""


class _Plain(Console):
    """Shows text as it is, but for control characters: what is printed may hold words from strangers' files."""

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
        """Whoever listened is gone: what is told on the way is worth no run, what is left of it no exit with 120."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable_lines(text), **style)


out, err = _Plain(), _Plain(stderr=True)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def progress_of(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of how many are done."""
    with _bar() as progress:
        task = progress.add_task(name, total=None, note="")
        yield lambda done, total: progress.update(task, completed=done, total=total)


class TrialDisplay:
    """A table that grows by a row per finished trial, above a bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task, self.count = progress, task, 0

    def start(self, candidate: Candidate) -> None:
        """Say what is being tried."""
        self.progress.update(self.task, note=candidate.label())

    def show(self, result: TrialResult) -> None:
        """Add the row of a finished trial."""
        if not self.count:
            self.progress.console.print(TRIAL_HEADER, style="bold")
        self.count += 1
        style = None if result.outcome == "ok" else "yellow"
        self.progress.console.print(trial_row(self.count, result), style=style)
        if result.message:
            self.progress.console.print(f"    {result.message}", style="dim")
        self.progress.update(self.task, completed=self.count)


@contextmanager
def trial_display(max_trials: int) -> Iterator[TrialDisplay]:
    """Show trials as they finish."""
    with _bar() as progress:
        yield TrialDisplay(progress, progress.add_task("trials", total=max_trials, note=""))


class TrainingDisplay:
    """One bar per phase: encoding, then steps with loss, time and memory."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None
        self.told = time.monotonic()

    def phase(self, name: str) -> None:
        """Announce what is done next."""
        self._end()
        self.progress.console.print(name, style="dim")

    def encoded(self, done: int, total: int) -> None:
        """Move the bar of the encoding phase."""
        self._update("encoding", done, total, "")

    def step(self, event: StepEvent) -> None:
        """Move the bar of the training phase; off a terminal, print a line for each tenth and each minute."""
        note = (
            f"loss {event.loss:.4f}  {event.seconds:.3f} s/step  {event.images_per_second:.1f} images/s  "
            f"{memory_text(event.memory_bytes)}"
        )
        if event.gpu_utilization is not None:
            note += f"  GPU {event.gpu_utilization:.0%}"
        self._update("training", event.step, event.num_steps, note)
        every = max(1, event.num_steps // 10)
        due = event.step % every == 0 or event.step == event.num_steps or time.monotonic() > self.told + QUIET_SECONDS
        if self.progress.disable and due:
            self.told = time.monotonic()
            left = seconds_text(event.remaining_seconds) + " left" if event.remaining_seconds else ""
            self.progress.console.print(f"step {event.step}/{event.num_steps}  {note}  {left}".rstrip())

    def warn(self, message: str) -> None:
        """Say what needs attention, above the bar."""
        self.progress.console.print(f"warning: {message}", style="yellow")

    def _update(self, name: str, done: int, total: int, note: str) -> None:
        if self.task is None:
            self.task = self.progress.add_task(name, total=total, note=note)
        self.progress.update(self.task, completed=done, note=note)

    def _end(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = None


@contextmanager
def training_display() -> Iterator[TrainingDisplay]:
    """Show a training run."""
    with _bar() as progress:
        yield TrainingDisplay(progress)
