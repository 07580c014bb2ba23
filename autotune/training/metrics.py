"""The record of a run: a line of `metrics.jsonl` per step, flushed, and the same numbers for a tracker's curves."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.atomic import write_whole
from autotune.training.events import StepEvent

METRICS_FILE = "metrics.jsonl"
TRACKER_FOLDER = "tensorboard"
CURVES = ("loss", "learning_rate", "gradient_norm", "seconds", "data_seconds", "images_per_second", "memory_bytes")


class Metrics:
    """Appends to the record in `folder`, keeping the first `resumed_at` steps of an earlier start and no more."""

    def __init__(self, folder: Path, *, resumed_at: int, report_to: str) -> None:
        path = folder / METRICS_FILE
        earlier = [event for event in read_metrics(path) if event.step <= resumed_at]
        write_whole(path, "".join(_line(event) for event in earlier))
        self.losses = [event.loss for event in earlier]
        self.seconds = [event.seconds for event in earlier]
        self._file = path.open("a", encoding="utf-8")
        self._tracker = _tracker(report_to, folder, resumed_at)

    def close(self) -> None:
        """End the record."""
        self._file.close()
        if self._tracker:
            self._tracker.finish()

    def add(self, event: StepEvent) -> None:
        """Record one step."""
        self.losses.append(event.loss)
        self.seconds.append(event.seconds)
        self._file.write(_line(event))
        self._file.flush()
        if self._tracker:
            self._tracker.log({name: getattr(event, name) for name in CURVES}, step=event.step)


def read_metrics(path: Path) -> list[StepEvent]:
    """The steps on record; a line that a kill cut short ends them."""
    events: list[StepEvent] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            events.append(StepEvent(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return events


def _line(event: StepEvent) -> str:
    return json.dumps(asdict(event)) + "\n"


def _tracker(report_to: str, folder: Path, resumed_at: int) -> Any:
    """accelerate's tracker: one interface for TensorBoard and wandb."""
    if report_to == "none":
        return None
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    PartialState()  # trackers ask it which process is the first
    if report_to == "wandb":
        tracker: Any = WandBTracker("autotune", dir=str(folder))
    else:
        # Steps after the checkpoint were perhaps logged by the start that died: TensorBoard then drops them.
        tracker = TensorBoardTracker(TRACKER_FOLDER, folder, purge_step=resumed_at + 1, flush_secs=30)
    tracker.start()
    return tracker
