"""The parent's side of trials: starts warm children, hands them candidates, and survives whatever they do."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from autotune.knobs.registry import KNOBS
from autotune.schema import Candidate, Choice, TrialResult, Workload
from autotune.trials.worker import TrialRequest, serve

STEADY_STEPS = 3
"""Timed steps of a trial; the median of three shrugs off one disturbance."""


@dataclass
class _Child:
    process: ForkServerProcess
    requests: Connection
    load_key: tuple[Choice, ...]


@dataclass
class ProcessTrialRunner:
    """Runs trials in child processes; candidates that need no reload share one child.

    Args:
        model: what the user calls the model: a folder or a known name.
        device: torch's name of the device.
        memory_cap_bytes: what a trial may take.
        timeout_seconds: limit of one trial, loading included.
    """

    model: str
    workload: Workload
    device: str
    memory_cap_bytes: int
    timeout_seconds: float = 600.0
    num_steps: int = STEADY_STEPS
    _child: _Child | None = field(default=None, init=False)
    _log: Path = field(init=False)

    def __post_init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="autotune-trial-", suffix=".log")
        os.close(handle)
        self._log = Path(name)

    def run(self, candidate: Candidate) -> TrialResult:
        """Run the candidate in a child that has, or loads, what it needs."""
        child = self._child_for(candidate)
        request = TrialRequest(
            model=self.model,
            workload=self.workload,
            candidate=candidate,
            device=self.device,
            num_steps=self.num_steps,
            memory_cap_bytes=self.memory_cap_bytes,
        )
        log_start = self._log.stat().st_size
        try:
            child.requests.send(request)
            if not child.requests.poll(self.timeout_seconds):
                self.close_child()
                return TrialResult(
                    candidate=candidate, outcome="timeout", message=f"no answer within {self.timeout_seconds:.0f} s"
                )
            result: TrialResult = child.requests.recv()
        except (EOFError, OSError):
            return self._died(child, candidate, log_start)
        if result.outcome not in ("ok", "numerics"):
            self.close_child()
        return result

    def _died(self, child: _Child, candidate: Candidate, log_start: int) -> TrialResult:
        child.process.join(timeout=10)
        code = child.process.exitcode
        self.close_child()
        if code == -signal.SIGKILL:
            return TrialResult(
                candidate=candidate, outcome="oom", message="killed by the system, most likely out of host memory"
            )
        with self._log.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        last = f": {lines[-1][:200]}" if lines else ""
        return TrialResult(candidate=candidate, outcome="crash", message=f"the trial process died, {cause}{last}")

    def _child_for(self, candidate: Candidate) -> _Child:
        key = tuple(getattr(candidate, knob.name) for knob in KNOBS if knob.needs_reload)
        if self._child and (self._child.load_key != key or not self._child.process.is_alive()):
            self.close_child()
        if self._child is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["autotune.trials.preload"])
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(self._log)), name="autotune-trial")
            with _imports_kept_quiet(self._log):
                process.start()
            theirs.close()
            self._child = _Child(process, ours, key)
        return self._child

    def close_child(self) -> None:
        """End the child and everything it started."""
        child, self._child = self._child, None
        if child is None:
            return
        child.requests.close()
        child.process.join(timeout=0.5)
        if child.process.is_alive() and child.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
            child.process.join()
        child.process.close()

    def __enter__(self) -> "ProcessTrialRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child()
        self._log.unlink(missing_ok=True)


@contextlib.contextmanager
def _imports_kept_quiet(log: Path) -> Iterator[None]:
    """The fork server inherits file descriptor 2 once, when it starts: give it the log instead of the terminal."""
    saved = os.dup(2)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(handle, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(handle)
