"""What every part shares: rows that survive a kill, the machine they come from, the models and
the work to measure."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.system.process import silence_libraries, silence_progress_bars

silence_libraries()

from autotune.machine.probe import probe
from autotune.models.resolve import resolve_model
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload, WorkloadRequest
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import Failure
from autotune.train.workload import describe_workload
from tests.small import write_small_pipeline

GIB = 2**30
ROOT = Path(__file__).parents[3]
LONG_SECONDS = 40.0
"""Left for an item, however long an earlier one took."""


@dataclass
class Evidence:
    """The rows of one part, written line by line."""

    part: str
    folder: Path
    small: bool
    slice_: tuple[int, int]
    ends: float
    options: argparse.Namespace
    longest: float = field(default=0.0, init=False)

    def row(self, kind: str, **values: Any) -> None:
        """Write one row at once: a part may be killed at any time."""
        number, of = self.slice_
        name = self.part if of == 1 else f"{self.part}-{number}of{of}"
        line = json.dumps(
            {"kind": kind, "part": self.part, "small": self.small, **values}, default=str
        )
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        sys.stdout.write(line[:300] + "\n")

    def skip(self, what: str, why: str) -> None:
        """Say what was left out, and why."""
        self.row("skipped", what=what, why=str(why).split("\n")[0][:300])

    def left(self) -> float:
        """Seconds until the part has to end."""
        return self.ends - time.monotonic()

    def each(self, items: Sequence[Any], name: Callable[[Any], str] = str) -> Iterable[Any]:
        """The items, while there is time for one as long as the longest so far; the rest is said
        to be skipped."""
        for item in items:
            if self.left() < min(1.2 * self.longest, LONG_SECONDS):
                self.skip(name(item), "no time left: run the part again with --slice")
                continue
            started = time.monotonic()
            yield item
            self.longest = max(self.longest, time.monotonic() - started)

    def ask(
        self, runner: ProcessTrialRunner, request: object, key: tuple[Any, ...] = ()
    ) -> dict[str, Any]:
        answer = runner.send(request, key, timeout_seconds=max(1.0, self.left()))
        if isinstance(answer, Failure):
            return {"outcome": answer.outcome, "message": answer.message}
        return {"outcome": "ok", **answer}

    def sliced(self, items: Sequence[Any]) -> Sequence[Any]:
        """Those that are this slice's."""
        number, of = self.slice_
        return items[number - 1 :: of]

    def scratch(self) -> Path:
        """A folder for large temporary files."""
        return Path(os.environ["SCRATCH"])

    def model(self, name: str) -> str:
        """The published architecture with random weights, or a tiny pipeline of the family."""
        if not self.small:
            return name
        folder = self.scratch() / f"small-{name}"
        if not (folder / "model_index.json").exists():
            write_small_pipeline(name, folder, ["a red square", "a blue circle on the left"])
        return str(folder)

    def size(self, full_px: int) -> int:
        """Side in px: as asked, or a tiny one."""
        return 16 * max(2, full_px // 256) if self.small else full_px


def begin(
    part: str, about: str | None, more: dict[str, str] | None = None, **extra: Any
) -> Evidence:
    """Read the options, with `more` of them and their defaults, and what `run` sets; open the
    part's rows and describe the machine."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in (more or {}).items():
        parser.add_argument(name, default=default)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--slice", default="1/1")
    parser.add_argument("--seconds", type=float, default=510.0)
    options = parser.parse_args()
    number, of = (int(text) for text in options.slice.split("/"))
    silence_progress_bars()
    imports_seconds = time.time() - psutil.Process().create_time()
    ends = time.monotonic() + options.seconds - imports_seconds
    folder = Path(os.environ["OUT"])
    evidence = Evidence(part, folder, options.small, (number, of), ends, options)
    evidence.row("machine", **machine(), **extra)
    return evidence


def machine() -> dict[str, Any]:
    """Date, commit, device, host and versions."""
    commit = os.environ.get("COMMIT")  # where the tree came without its history
    with contextlib.suppress(OSError):  # no git
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            or commit
        )
    facts = probe().model_dump(mode="json", include={"device", "host", "versions"})
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"date": date, "commit": commit, **facts}


def workload_of(model: str, size_px: int | tuple[int, int], *, rank: int, batch: int,
                targets: str = "attention", padding: str = "exact",
                text_tokens: int | None = None, num_frames: int = 1) -> Workload:  # fmt: skip
    """A square of `size_px`, or (width, height); captions of one length unless `masked`."""
    captions: dict[str, Any] = {} if text_tokens is None else {"text_tokens": text_tokens}
    workload_overrides = WorkloadRequest(
        resolution=(size_px, size_px) if isinstance(size_px, int) else size_px,
        num_frames=num_frames,
        rank=rank,
        effective_batch_size=batch,
        targets=targets,
        **captions,
    )
    asked = describe_workload(resolve_model(ModelRef.of(model)), None, workload_overrides)
    return Workload.model_validate({**dict(asked), "text_padding": padding, "quality": "compact"})


def precision_of(hardware: HardwareProfile) -> str:
    """bf16 on a GPU; fp32 in rehearsals on a CPU."""
    return "bf16" if hardware.device.kind == "cuda" else "fp32"
