"""Metrics of a run: a line of `metrics.jsonl` per step, and a tracker's curves."""

import math
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotune.errors import InvalidInput, first_line
from autotune.events import Event, OnEvent, RunStarted, StepFinished
from autotune.system.files import atomic_write, open_regular

METRICS_FILE = "metrics.jsonl"
TRACKER_FOLDER = "tensorboard"
# Fields of a step that trackers draw.
CURVES = (
    "loss", "validation_loss", "base_validation_loss", "learning_rate", "gradient_norm",
    "gradient_spikes", "seconds", "data_seconds", "images_per_second", "memory_bytes",
    "gpu_utilization",
)  # fmt: skip

MAX_LINE_BYTES = 1 << 16
MAX_NUMBER = 1e100  # far beyond any measurement; sums of smaller numbers are finite
STEPS = range(1, 10**9)


@dataclass(frozen=True)
class Tracker:
    """Functions that take a step's numbers and its PNG files by name."""

    log: Callable[[dict[str, float], int], None] = lambda values, step: None
    show: Callable[[dict[str, Path], int], None] = lambda files, step: None
    finish: Callable[[], None] = lambda: None


class Metrics:
    """The metrics in `folder`, of which the first `resumed_at` steps are kept."""

    def __init__(
        self,
        folder: Path,
        resumed_at: int,
        report_to: str,
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = path = folder / METRICS_FILE
        with atomic_write(path) as part, part.open("w", encoding="utf-8") as kept:
            kept.writelines(_line(step) for step in read_metrics(path) if step.step <= resumed_at)
        self._file = path.open("a", encoding="utf-8")
        self._on_warning = on_warning
        self._tracker = Tracker()
        with self._without_failing_tracker():
            self._tracker = TRACKERS[report_to](folder, resumed_at)

    @contextmanager
    def _without_failing_tracker(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers raise what their threads and their servers do
            self._tracker = Tracker()
            self._on_warning(f"no more curves: {first_line(error)}; {METRICS_FILE} has all numbers")

    def close(self) -> None:
        self._file.close()
        with self._without_failing_tracker():
            self._tracker.finish()

    def sync(self) -> None:
        """Put on disk what a checkpoint stands on: resuming keeps the steps up to it."""
        os.fsync(self._file.fileno())

    def add_previews(self, step: int, files: Sequence[Path]) -> None:
        named = {f"preview {number}": file for number, file in enumerate(files, start=1)}
        with self._without_failing_tracker():
            self._tracker.show(named, step)

    def add(self, event: StepFinished) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = self.path.open("a", encoding="utf-8")
            lost = f"{self.path.parent} was deleted, with all that it held; the run goes on"
            self._on_warning(lost)
        self._file.write(_line(event))
        self._file.flush()
        values = [(name, getattr(event, name)) for name in CURVES]
        known = {name: value for name, value in values if value is not None}
        with self._without_failing_tracker():
            self._tracker.log(known, event.step)


class Steps(NamedTuple):
    """The last step of a log, and numbers of all: one may have 200,000, each 1.5 KB as an object.
    What is unknown is NaN."""

    last: StepFinished | None = None
    step: Sequence[float] = ()
    loss: Sequence[float] = ()
    validation_loss: Sequence[float] = ()
    base_validation_loss: Sequence[float] = ()
    seconds: Sequence[float] = ()
    data_seconds: Sequence[float] = ()
    memory_bytes: Sequence[float] = ()
    gpu_utilization: Sequence[float] = ()

    @classmethod
    def of(cls, events: Iterable[StepFinished]) -> Self:
        last, columns = None, {name: array("d") for name in cls._fields[1:]}
        for last in events:
            for name, column in columns.items():
                value = getattr(last, name)
                column.append(math.nan if value is None else value)
        return cls(last, **columns)


def read_metrics(
    path: Path, on_damage: Callable[[str], None] = lambda text: None
) -> Iterator[StepFinished]:
    """Read the steps up to the first damaged line, and tell `on_damage` unless a kill cut it."""
    number = 1
    try:
        with open_regular(path) as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                if (event := _step_in(line)) is None:
                    is_part = line.startswith(b"{") and not line.endswith(b"\n")
                    if not is_part or lines.read(1):
                        where = f"{path.name} is damaged in line {number}"
                        on_damage(f"{where}: no step from there on is known.")
                    break
                yield event
                number += 1
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            on_damage(f"{path.name} cannot be read: {error.strerror}.")


def _step_in(line: bytes) -> StepFinished | None:
    try:
        event = StepFinished.model_validate_json(line)
    except (ValueError, RecursionError):
        return None
    numbers = filter(None, (getattr(event, name) for name in CURVES))
    is_possible = event.step in STEPS and event.num_steps in STEPS and event.seconds > 0
    return event if is_possible and max(map(abs, numbers)) <= MAX_NUMBER else None


def _line(event: StepFinished) -> str:
    return event.model_dump_json(exclude_none=True) + "\n"


def require_tracker(report_to: str) -> None:
    """Raise InvalidInput if a job reports to a package that is not installed."""
    if report_to != "none" and find_spec(report_to) is None:
        hint = f"pip install {report_to}, or set report_to in the plan's job to none"
        raise InvalidInput(f"the job reports to {report_to}, which is not installed", hint=hint)


def _wandb(folder: Path, resumed_at: int) -> Tracker:
    from accelerate import PartialState
    from accelerate.tracking import WandBTracker
    from PIL import Image

    PartialState()  # tells the tracker which process is the first
    tracker: Any = WandBTracker("autotune", dir=str(folder))
    tracker.start()

    def show(files: dict[str, Path], step: int) -> None:
        tracker.log_images({name: [Image.open(file)] for name, file in files.items()}, step=step)

    return Tracker(lambda values, step: tracker.log(values, step=step), show, tracker.finish)


def _tensorboard(folder: Path, resumed_at: int) -> Tracker:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from torch.utils.tensorboard import SummaryWriter

    _mute_writers()
    # TensorBoard drops steps after the checkpoint, which the start that died may have logged.
    target, purge_step = str(folder / TRACKER_FOLDER), resumed_at + 1
    writer: Any = SummaryWriter(target, purge_step=purge_step, flush_secs=30)

    def log(values: dict[str, float], step: int) -> None:
        # As one event: with `add_scalar` each value would be one, which slows a short step down.
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.file_writer.add_summary(Summary(value=points), step)

    def show(files: dict[str, Path], step: int) -> None:
        pictures = []
        for name, file in files.items():
            with Image.open(file) as opened:
                size = {"width": opened.width, "height": opened.height, "colorspace": 3}
            image = Summary.Image(encoded_image_string=file.read_bytes(), **size)
            pictures.append(Summary.Value(tag=name, image=image))
        writer.file_writer.add_summary(Summary(value=pictures), step)

    return Tracker(log, show, writer.close)


def _mute_writers() -> None:
    """Let TensorBoard's threads print no failures: the next call raises them."""
    others = threading.excepthook
    if others.__module__ == __name__:
        return

    def show_failure(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            others(failure)

    threading.excepthook = show_failure


TRACKERS: dict[str, Callable[[Path, int], Tracker]] = {
    "none": lambda folder, resumed_at: Tracker(),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


@contextmanager
def serve_metrics(port: int, on_event: OnEvent) -> Iterator[OnEvent]:
    """Serve each number of a step to Prometheus, on this machine's loopback; gives a listener."""
    if find_spec("prometheus_client") is None:
        hint = "install it: pip install 'lora-autotune[metrics]'"
        raise InvalidInput("serving metrics needs prometheus_client", hint=hint)
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()

    def keep(name: str, text: str | None, value: float) -> None:
        if name not in gauges:
            gauges[name] = Gauge(f"autotune_{name}", text or name, registry=registry)
        gauges[name].set(value)

    def listen(event: Event) -> None:
        on_event(event)
        if isinstance(event, RunStarted):
            promised = event.plan.frozen.expected.run_memory_bytes
            keep("promised_memory_bytes", "Memory that the plan promised.", promised)
        elif isinstance(event, StepFinished):
            for name, field in StepFinished.model_fields.items():
                if isinstance(value := getattr(event, name), int | float):
                    keep(name, field.description, value)

    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except (OSError, OverflowError) as error:
        message = f"metrics cannot be served at port {port}: {error}"
        raise InvalidInput(message, hint="name another: --metrics-port PORT") from error
    try:
        yield listen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
