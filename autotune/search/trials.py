"""The parent's side of trials: starts warm children, sends them requests, and survives whatever
they do."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from autotune.knobs.registry import reload_key
from autotune.knobs.settings import check_options
from autotune.machine.capabilities import MIN_MARGIN_BYTES, default_reserve_bytes
from autotune.machine.probe import DeviceLock, lock_path
from autotune.plan.candidate import CachingSettings, Candidate, Choice, Outcome, TrialResult
from autotune.plan.hardware import HardwareProfile, process_overhead_bytes, shares_host_memory
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Prediction
from autotune.plan.workload import Workload
from autotune.search.fork_server import fork_server_context
from autotune.search.rehearsal import RehearsalRequest
from autotune.search.worker import Failure, MemoryLimits, TrialRequest, serve
from autotune.system.files import make_scratch_folder
from autotune.system.process import redirect_output
from autotune.train.monitor import POLL_SECONDS, SPILL_FACTOR, Watchdog

NUM_STEADY_STEPS = 3
"""Timed steps of a trial; the median of three shrugs off one disturbance."""
TRIAL_TIMEOUT_SECONDS = 600.0
"""Limit on one trial, loading included."""
CPU_SPARE_BYTES = 1 << 30
"""On a CPU a child may take this much more than its budget, for the profiler's list of a step's
allocations (some 300 MiB for eight micro-batches of six blocks) and files that it maps: the
parent compares what the process took with the budget afterwards."""


@dataclass
class _Child:
    process: ForkServerProcess
    requests: Connection
    key: tuple[Choice, ...]
    available_before: int
    """Available host memory in bytes when the child started."""


class ProcessTrialRunner:
    """Runs trials in child processes of this machine; candidates that need no reload share one
    child.

    The device's lock is held from the first trial to the end, or until another search wants a turn
    between two trials.

    A trial may take `budget`, its process's own overhead included (by default what the device
    leaves), and a rehearsal `resident_bytes` besides, which a run keeps on the device. Without
    `predict`, the cost model's, no spill is found by step time.

    Raises:
        InvalidInput: the workload's optimizer cannot be loaded, or is a `package:Class` that the
            user has not named.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ModelRef,
        workload: Workload,
        *,
        budget_bytes: int | None = None,
        resident_bytes: int = 0,
        predict: Callable[[Candidate], Prediction] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        check_options(
            workload.optimizer
        )  # here, where the user may have named a `package:Class`; children follow
        device = hardware.device
        self.model, self.workload, self.device, self.predict = (
            model,
            workload,
            device.torch_name,
            predict,
        )
        self.shares_memory = shares_host_memory(device.memory_kind)
        self.budget_bytes = device.budget_bytes if budget_bytes is None else budget_bytes
        self.resident_bytes = resident_bytes
        overhead = (
            process_overhead_bytes(hardware)
            if self.device == "cpu" or not self.shares_memory
            else 0
        )
        self.memory_cap_bytes = self.budget_bytes - overhead
        usual = default_reserve_bytes(
            device.memory_kind, device.total_memory_bytes or 0, device.drives_display
        )
        self.reserve_bytes = MIN_MARGIN_BYTES + usual
        """Part of a card's free memory that is left alone when a child starts."""
        self.budget_set_by_user = device.budget_set_by_user
        """If true, results carry the cap: they are no evidence for devices of this size."""
        self.watchdog = watchdog or Watchdog.of_device(device.memory_kind)
        self.lock = DeviceLock(lock_path(device))
        self.timeout_seconds = TRIAL_TIMEOUT_SECONDS
        self.num_steps = NUM_STEADY_STEPS
        self._child: _Child | None = None
        self._ran: list[tuple[TrialResult, TimedTrial]] = []
        self._scratch = make_scratch_folder("trial")
        self._log = Path(self._scratch.name) / "log"
        self._log.touch()

    def run(self, candidate: Candidate) -> TrialResult:
        """Run the candidate in a child that has, or loads, the model it needs.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        self.lock.acquire()
        started = time.monotonic()  # waiting for the device is no part of a trial's cost
        best, _ = min(self._ran, key=lambda ran: ran[1].seconds, default=(None, None))
        limit = pruning_threshold(best)
        request = TrialRequest(
            self.model, self.workload, candidate, self.device, self.num_steps, limit
        )
        result = self.classify(candidate, self.send(request, reload_key(candidate)))
        return result.changed(wall_seconds=round(time.monotonic() - started, 3))

    def confirm(
        self, candidate: Candidate, caching: CachingSettings, max_seconds: float
    ) -> TrialResult:
        """Run a candidate that has won through every phase of a run, and until its steps are
        steady.

        If a later phase fails or takes too long, what training showed stands, and the message says
        so.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        self.lock.acquire()
        started = time.monotonic()
        self.close_child()  # phases are measured from an empty device on
        common = (self.model, self.workload, candidate, self.device, self.num_steps)
        scratch = self._scratch.name
        request = RehearsalRequest(
            *common, caching=caching, max_seconds=max_seconds, scratch_folder=scratch
        )
        result = self.send(request)
        if isinstance(result, Failure) and result.partial is not None:
            phases = ", ".join(phase.name for phase in result.partial.phases)
            result = result.partial.changed(
                message=f"confirmed as far as {phases}: {result.message}"
            )
        confirmed = self.classify(candidate, result)
        return confirmed.changed(confirms=True, wall_seconds=round(time.monotonic() - started, 3))

    def classify(self, candidate: Candidate, result: TrialResult | Failure) -> TrialResult:
        """The result as the parent sees it: failures become outcomes, spills are found, a user's
        budget is marked."""
        user_cap = None
        if self.budget_set_by_user:
            user_cap = self.budget_bytes if self.device == "cpu" else self.memory_cap_bytes
        if isinstance(result, Failure):
            self.close_child()
            return TrialResult(
                candidate=candidate,
                outcome=result.outcome,
                message=result.message,
                host_memory_bytes=result.host_memory_bytes,
                memory_cap_bytes=user_cap,
            )
        result = result.changed(memory_cap_bytes=user_cap)
        if self.device == "cpu" and (why := self._exceeded(result)):
            return result.changed(outcome="oom", message=why)
        seconds = result.median_step_seconds
        if result.outcome != "ok" or seconds is None:
            return result
        now = TimedTrial(seconds, self.predict(candidate).step_seconds if self.predict else seconds)
        why = find_spill(result, now, [timed for _, timed in self._ran], self.memory_cap_bytes)
        if why:
            self.close_child()
            return result.changed(outcome="spill", message=why)
        self._ran.append((result, now))
        return result

    def _exceeded(self, result: TrialResult) -> str | None:
        """Why the process took more of the host's memory than it may, in whichever phase; None
        if it did not."""
        allowed, taken = self.budget_bytes, {"trial": result.host_memory_bytes or 0}
        if result.phases:
            allowed += self.resident_bytes
            taken = {f"{phase.name} phase": phase.host_bytes or 0 for phase in result.phases}
        largest = max(taken, key=lambda name: taken[name])
        if taken[largest] <= allowed:
            return None
        return (
            f"the {largest} takes {taken[largest] / 2**20:,.0f} MiB, {allowed / 2**20:,.0f} "
            "MiB "
            "may be taken"
        )

    def send(
        self, request: Any, key: tuple[Choice, ...] = (), timeout_seconds: float | None = None
    ) -> Any:
        """What a child with that `key` makes of a request (see `worker.TASKS`), or the Failure that
        ended the child.

        Raises:
            AutotuneError: another search has the device and does not end.
        """
        child = self._child_for(key)
        log_start = self._log.stat().st_size
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        partial = None
        try:
            child.requests.send(request)
            for is_final, result in self._receive(child, limit):
                if is_final:
                    break
                partial = result
        except (EOFError, OSError):
            result = self._explain_death(child, log_start)
        if isinstance(result, Failure):
            self.close_child()
            result = replace(result, partial=partial)
        if self.lock.has_waiting_search():
            self.close_child()  # the other search must find the device empty
            self.lock.release()
        return result

    def _receive(self, child: _Child, limit_seconds: float) -> Iterator[tuple[bool, Any]]:
        """(is final, result) as they come, while the host has memory and time is left."""
        deadline = time.monotonic() + limit_seconds
        while True:
            if child.requests.poll(POLL_SECONDS):
                yield child.requests.recv()
            elif shortage := self.watchdog.find_shortage():
                yield True, Failure(self._host_oom, shortage)
            elif time.monotonic() > deadline:
                yield True, Failure("timeout", f"no answer within {limit_seconds:.0f} s")

    def _explain_death(self, child: _Child, log_start: int) -> Failure:
        child.process.join(timeout=10)
        code = child.process.exitcode
        if code == -signal.SIGKILL:
            return Failure(self._host_oom, "killed by the system, most likely out of host memory")
        with self._log.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        if lines and lines[-1].startswith(
            MemoryError.__name__
        ):  # too little memory even to report it
            return Failure("oom", "the trial process had too little memory to work at all")
        cause = (
            signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        )
        last = f": {lines[-1][:200]}" if lines else ""
        ran_out = any(word in last for word in ("MemoryError", "bad_alloc"))
        return Failure(
            self._host_oom if ran_out else "crash", f"the trial process died, {cause}{last}"
        )

    @property
    def _host_oom(self) -> Outcome:
        """The outcome when the host runs out of memory."""
        return "oom" if self.shares_memory else "host_oom"

    def _cap_bytes(self) -> int:
        """What a trial may take now: on shared memory never what the watchdog would end it for."""
        if not self.shares_memory:  # the child asks the card itself
            return self.memory_cap_bytes
        spare = CPU_SPARE_BYTES if self.device == "cpu" else 0
        return max(
            0,
            min(
                self.memory_cap_bytes + spare, self.watchdog.available() - self.watchdog.floor_bytes
            ),
        )

    def _child_for(self, key: tuple[Choice, ...]) -> _Child:
        if self._child and (self._child.key != key or not self._child.process.is_alive()):
            self.close_child()
        if self._child is None:
            self.lock.acquire()
            available = self.watchdog.available()
            limits = MemoryLimits(self.device, self._cap_bytes(), self.reserve_bytes)
            context = fork_server_context()
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, str(self._log), limits), name="autotune-trial"
            )
            with redirect_output(self._log):  # the fork server inherits it once, when it starts
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
        if self.device == "cpu":  # known exactly, however much other processes take meanwhile
            wanted = self.watchdog.available() + _private_bytes(child.process.pid)
        child.requests.close()
        child.process.join(timeout=0.5)
        if child.process.is_alive() and child.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
            child.process.join()
        child.process.close()
        self.watchdog.wait_for_memory(wanted)

    def __enter__(self) -> "ProcessTrialRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child()
        self.lock.release()
        self._scratch.cleanup()


def _private_bytes(process_id: int | None) -> int:
    try:
        return int(psutil.Process(process_id).memory_full_info().uss)
    except psutil.Error:
        return 0


NEAR_BUDGET = 0.85
"""Share of the budget: settings that need less do not spill."""
CLEARLY_SLOWER = 1.25
"""Times the best median: finishing the trial would not change the order."""
NUM_SPREADS = 4.0
"""Interquartile ranges of the best trial's steps that count as noise."""


@dataclass(frozen=True)
class TimedTrial:
    """The measured step time of a trial, and what was predicted for it at that time."""

    seconds: float
    predicted_seconds: float


def find_spill(
    result: TrialResult, now: TimedTrial | None, earlier: Sequence[TimedTrial], cap_bytes: int
) -> str | None:
    """Why a trial that ran must have gone beyond the device's memory; None if nothing says so.

    Drivers on Windows and WSL move memory to the host instead of failing, and hosts swap. Steps are
    then far slower than predicted, and than what earlier trials say about predictions; all are of
    the same effective batch.
    """
    if result.allocator_retries:
        times = "once" if result.allocator_retries == 1 else f"{result.allocator_retries} times"
        return f"the allocator ran out and started over {times}: a longer run would run out"
    near = (result.peak_memory_bytes or 0) >= NEAR_BUDGET * cap_bytes
    if now is None or not near or not earlier:
        return None
    slowest = max(timed.seconds for timed in earlier)
    ratio = now.seconds / now.predicted_seconds
    usual = max(1.0, *(timed.seconds / timed.predicted_seconds for timed in earlier))
    if ratio < SPILL_FACTOR * usual or now.seconds < SPILL_FACTOR * slowest:
        return None
    return (
        f"a step took {now.seconds:.3g} s, {ratio:.1f} times what was predicted, at the edge "
        "of "
        "memory: it spilled"
    )


def pruning_threshold(best: TrialResult | None) -> float | None:
    """Step seconds above which a trial cannot win against `best`, noise included; None if
    nothing has run."""
    median = best.median_step_seconds if best else None
    if best is None or median is None:
        return None
    ordered = sorted(best.step_seconds)
    spread = (ordered[-1 - len(ordered) // 4] - ordered[len(ordered) // 4]) / median
    return median * max(CLEARLY_SLOWER, 1 + NUM_SPREADS * spread)
