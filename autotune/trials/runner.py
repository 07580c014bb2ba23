"""The parent's side of trials: starts warm children, hands them requests, and survives whatever they do."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from autotune.hardware import (
    MIN_MARGIN_BYTES,
    DeviceLock,
    default_reserve_bytes,
    lock_path,
    process_overhead_bytes,
    shares_host_memory,
)
from autotune.knobs import reload_key
from autotune.runtime import redirect_stderr
from autotune.schema import (
    CachingSettings,
    Candidate,
    Choice,
    HardwareProfile,
    Outcome,
    Prediction,
    TrialResult,
    Workload,
)
from autotune.trials.outcomes import Timed, hopeless_seconds, spilled
from autotune.trials.requests import RehearsalRequest, Request, TrialRequest
from autotune.trials.watchdog import WATCH_SECONDS, Watchdog, usual_watchdog
from autotune.trials.worker import Allowance, Failure, serve

STEADY_STEPS = 3
"""Timed steps of a trial; the median of three shrugs off one disturbance."""
TRIAL_TIMEOUT_SECONDS = 600.0
"""Of one trial, loading included."""
BESIDE_TENSORS_BYTES = 1 << 30
"""On a processor, for libraries that a trial imports and the profiler's list of a step's allocations (some 300 MiB for
eight micro-batches of six blocks): what a run may take there is counted in tensors, when the answer has come."""


@dataclass
class _Child:
    process: ForkServerProcess
    requests: Connection
    key: tuple[Choice, ...]
    available_before: int
    """What the host had when the child started."""


class ProcessTrialRunner:
    """Runs trials in child processes of this machine; candidates that need no reload share one child.

    The device's lock is held from the first trial to the end, or until another search wants a turn between two trials.

    Args:
        hardware: this machine. A trial may take its budget; on a processor with its tensors alone.
        model: what the user calls the model: a folder or a known name.
        workload: of one process.
        predict: what is expected of a candidate; without it no spill is told by its step time.
        watchdog: ends a child before the host runs out; by default as suits the device.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: str,
        workload: Workload,
        *,
        predict: Callable[[Candidate], Prediction] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        device = hardware.device
        self.model, self.workload, self.device, self.predict = model, workload, device.torch_name, predict
        self.shares_memory = shares_host_memory(device.memory_kind)
        self.memory_cap_bytes = device.budget_bytes - (0 if self.shares_memory else process_overhead_bytes(hardware))
        usual = default_reserve_bytes(device.memory_kind, device.total_memory_bytes or 0, device.drives_display)
        self.reserve_bytes = MIN_MARGIN_BYTES + usual
        """Left of what a card has free when a child starts."""
        self.mark_cap = device.budget_set_by_user
        """Whether results say that the user, not the device, decided the cap."""
        self.watchdog = watchdog or usual_watchdog(device.memory_kind)
        self.lock = DeviceLock(lock_path(device))
        self.timeout_seconds = TRIAL_TIMEOUT_SECONDS
        self.num_steps = STEADY_STEPS
        self._child: _Child | None = None
        self._ran: list[tuple[TrialResult, Timed]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="autotune-trial-", ignore_cleanup_errors=True)
        self._log = Path(self._scratch.name) / "log"
        self._log.touch()

    def run(self, candidate: Candidate) -> TrialResult:
        """Run the candidate in a child that has, or loads, what it needs; the result says what that cost.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        started = self._turn()
        best, _ = min(self._ran, key=lambda ran: ran[1].seconds, default=(None, None))
        limit = hopeless_seconds(best)
        request = TrialRequest(self.model, self.workload, candidate, self.device, self.num_steps, limit)
        result = self.classify(candidate, self.ask(request, reload_key(candidate)))
        return result.changed(wall_seconds=round(time.monotonic() - started, 3))

    def _turn(self) -> float:
        """Wait for the device; returns when that ended, in monotonic seconds: waiting is no trial's cost."""
        self.lock.acquire()
        return time.monotonic()

    def confirm(self, candidate: Candidate, caching: CachingSettings, most_seconds: float) -> TrialResult:
        """Run a candidate that has won through every phase of a run, and until its steps are steady.

        Where another phase fails or takes too long, what training showed stands, and the message says so.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        started = self._turn()
        self.close_child()  # phases are measured from an empty device on
        request = RehearsalRequest(
            self.model,
            self.workload,
            candidate,
            self.device,
            self.num_steps,
            caching=caching,
            most_seconds=most_seconds,
            scratch=self._scratch.name,
        )
        answer = self.ask(request)
        if isinstance(answer, Failure) and answer.so_far is not None:
            known = ", ".join(phase.name for phase in answer.so_far.phases)
            answer = answer.so_far.changed(message=f"confirmed as far as {known}: {answer.message}")
        result = self.classify(candidate, answer)
        return result.changed(confirms=True, wall_seconds=round(time.monotonic() - started, 3))

    def classify(self, candidate: Candidate, answer: TrialResult | Failure) -> TrialResult:
        """The outcome as the parent sees it: failures typed, spills found, a cap set by the user marked."""
        mark = self.memory_cap_bytes if self.mark_cap else None
        if isinstance(answer, Failure):
            self.close_child()
            return TrialResult(
                candidate=candidate,
                outcome=answer.outcome,
                message=answer.message,
                host_memory_bytes=answer.host_memory_bytes,
                memory_cap_bytes=mark,
            )
        result = answer.changed(memory_cap_bytes=mark)
        if self.device == "cpu" and (result.peak_memory_bytes or 0) > self.memory_cap_bytes:
            most = f"{self.memory_cap_bytes / 2**20:,.0f} MiB may be taken"
            took = f"a step takes {(result.peak_memory_bytes or 0) / 2**20:,.0f} MiB"
            return result.changed(outcome="oom", message=f"{took}, {most}")
        seconds = result.median_step_seconds
        if result.outcome != "ok" or seconds is None:
            return result
        now = Timed(seconds, self.predict(candidate).step_seconds if self.predict else seconds)
        why = spilled(result, now, [timed for _, timed in self._ran], self.memory_cap_bytes)
        if why:
            self.close_child()
            return result.changed(outcome="spill", message=why)
        self._ran.append((result, now))
        return result

    def ask(self, request: Request, key: tuple[Choice, ...] = (), timeout_seconds: float | None = None) -> Any:
        """What a child with that `key` answers to the request, or the Failure; after one the child is gone.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        child = self._child_for(key)
        log_start = self._log.stat().st_size
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        so_far = None
        try:
            child.requests.send(request)
            for final, answer in self._answers(child, limit):
                if final:
                    break
                so_far = answer
        except (EOFError, OSError):
            answer = self._death(child, log_start)
        if isinstance(answer, Failure):
            self.close_child()
            answer = replace(answer, so_far=so_far)
        if self.lock.has_waiting_search():
            self.close_child()  # the other must find the device empty
            self.lock.release()
        return answer

    def _answers(self, child: _Child, limit_seconds: float) -> Iterator[tuple[bool, Any]]:
        """(is final, answer) as they come, while the host lives and time is left."""
        deadline = time.monotonic() + limit_seconds
        while True:
            if child.requests.poll(WATCH_SECONDS):
                yield child.requests.recv()
            elif alarm := self.watchdog.alarm():
                yield True, Failure(self._host_ran_out, alarm)
            elif time.monotonic() > deadline:
                yield True, Failure("timeout", f"no answer within {limit_seconds:.0f} s")

    def _death(self, child: _Child, log_start: int) -> Failure:
        child.process.join(timeout=10)
        code = child.process.exitcode
        if code == -signal.SIGKILL:
            return Failure(self._host_ran_out, "killed by the system, most likely out of host memory")
        with self._log.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        if lines and lines[-1].startswith(MemoryError.__name__):  # not even enough to answer that it was too little
            return Failure("oom", "the trial process had too little memory to work at all")
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        last = f": {lines[-1][:200]}" if lines else ""
        ran_out = any(word in last for word in ("MemoryError", "bad_alloc"))
        return Failure(self._host_ran_out if ran_out else "crash", f"the trial process died, {cause}{last}")

    @property
    def _host_ran_out(self) -> Outcome:
        return "oom" if self.shares_memory else "host_oom"

    def _cap_bytes(self) -> int:
        """What a trial may take now: on shared memory never what the watchdog would end it for."""
        if not self.shares_memory:  # the child asks the card itself
            return self.memory_cap_bytes
        beside = BESIDE_TENSORS_BYTES if self.device == "cpu" else 0
        return max(0, min(self.memory_cap_bytes + beside, self.watchdog.available() - self.watchdog.floor_bytes))

    def _child_for(self, key: tuple[Choice, ...]) -> _Child:
        if self._child and (self._child.key != key or not self._child.process.is_alive()):
            self.close_child()
        if self._child is None:
            self.lock.acquire()
            available = self.watchdog.available()
            allowance = Allowance(self.device, self._cap_bytes(), self.reserve_bytes)
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["autotune.trials.preload"])
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(self._log), allowance), name="autotune-trial")
            with redirect_stderr(self._log):  # the fork server inherits it once, when it starts
                process.start()
            theirs.close()
            self._child = _Child(process, ours, key, available)
        return self._child

    def close_child(self) -> None:
        """End the child and everything it started, and wait until the host has its memory back."""
        child, self._child = self._child, None
        if child is None:
            return
        wanted = child.available_before
        if self.device == "cpu":  # exactly known, however much others take meanwhile
            wanted = self.watchdog.available() + _private_bytes(child.process.pid)
        child.requests.close()
        child.process.join(timeout=0.5)
        if child.process.is_alive() and child.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
            child.process.join()
        child.process.close()
        self.watchdog.wait_for_return(wanted)

    def __enter__(self) -> "ProcessTrialRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child()
        self.lock.release()
        self._scratch.cleanup()


def _private_bytes(process_id: int | None) -> int:
    """What the system gets back when the process ends."""
    try:
        return int(psutil.Process(process_id).memory_full_info().uss)
    except psutil.Error:
        return 0
