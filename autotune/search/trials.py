"""Processes of trials: starts warm children, sends them requests, and survives whatever they do.

A child leads a process group, so that the parent can end it with all it started, and ends itself
when the parent is gone or after a `Failure`, which may have left the device in disorder.
"""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from autotune.cost.predict import CostModel
from autotune.events import TrialFinished
from autotune.knobs.registry import reload_key
from autotune.knobs.settings import allow_optimizer, check_options, configure_allocator
from autotune.machine.capabilities import MIN_MARGIN_BYTES, default_reserve_bytes
from autotune.machine.lock import DeviceLock, lock_path
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import CachingSettings, Candidate, Choice, Outcome, TrialResult
from autotune.plan.hardware import HardwareProfile, shares_host_memory
from autotune.plan.prediction import Prediction
from autotune.plan.workload import Workload
from autotune.search import rehearsal, worker
from autotune.system import files, memory
from autotune.system.process import fork_server_context
from autotune.train import monitor, processes
from autotune.train.watchdog import POLL_SECONDS, Watchdog

TrialFunction = Callable[[Candidate], TrialResult]

NUM_STEADY_STEPS = 3  # timed steps of a trial; the median of three shrugs off one disturbance
TRIAL_TIMEOUT_SECONDS = 600.0  # limit on one trial, loading included
CPU_SPARE_BYTES = 1 << 30
"""A CPU's child may take so much beyond its budget for mapped files and the profiler's list of
allocations (some 300 MiB): the parent compares what it took with the budget afterwards."""
NEAR_BUDGET = 0.85  # share of the budget: settings that need less do not spill
CLEARLY_SLOWER = 1.25  # times the best median: finishing the trial would not change the order
NUM_SPREADS = 4.0  # interquartile ranges of the best trial's steps that count as noise
CAP_SLACK_BYTES = 1 << 30
"""CUDA's allocator holds a whole request against the cap, though an expandable segment has part
of it (`alloc_block`). What a trial really took is held against the cap when it has run."""


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that a child may take, whatever the machine would allow."""

    device: str
    cap_bytes: int
    reserve_bytes: int  # part of a card's free memory that is left alone when the child starts


@dataclass
class _Child:
    process: ForkServerProcess
    requests: Connection
    key: tuple[Choice, ...]
    available_before: int


class ProcessTrialRunner:
    """Runs trials in child processes; candidates that need no reload share one child.

    The device's lock is held until the end, or until another search wants a turn between trials. A
    trial may take `budget_bytes`, its process's own overhead included, and a rehearsal
    `resident_bytes` besides. Without `predict`, no spill is found by step time. Raises InvalidInput
    if the workload's optimizer cannot be loaded, or was not named by the user.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ResolvedModel,
        workload: Workload,
        *,
        budget_bytes: int | None = None,
        resident_bytes: int = 0,
        predict: Callable[[Candidate], Prediction] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        check_options(workload.optimizer)  # here, where the user may have named a `package:Class`
        device = hardware.device
        self.model, self.workload, self.predict = model, workload, predict
        self.device = device.torch_name
        self.shares_memory = shares_host_memory(device.memory_kind)
        self.budget_bytes = device.budget_bytes if budget_bytes is None else budget_bytes
        self.resident_bytes, self.memory_cap_bytes = resident_bytes, self.budget_bytes
        if self.device == "cpu" or not self.shares_memory:
            self.memory_cap_bytes -= hardware.process_overhead_bytes
        total_bytes = device.total_memory_bytes or 0
        usual = default_reserve_bytes(device.memory_kind, total_bytes, device.drives_display)
        self.reserve_bytes = MIN_MARGIN_BYTES + usual
        self.user_cap_bytes: int | None = None
        """Cap that the user set: such results are no evidence for devices of this size."""
        if device.budget_set_by_user:
            is_cpu = self.device == "cpu"
            self.user_cap_bytes = self.budget_bytes if is_cpu else self.memory_cap_bytes
        self.watchdog = watchdog or Watchdog.of_device(device.memory_kind)
        self.lock = DeviceLock(lock_path(device))
        self.timeout_seconds = TRIAL_TIMEOUT_SECONDS
        self.num_steps = NUM_STEADY_STEPS
        self._child: _Child | None = None
        self._ran: list[tuple[TrialResult, float]] = []
        """Results with the step seconds that were predicted for them."""
        self._scratch = files.make_scratch_folder("trial")
        self._log = Path(self._scratch.name) / "log"
        self._log.touch()

    def run(self, candidate: Candidate) -> TrialResult:
        """Run the candidate in a child that has, or loads, the model it needs."""
        self.lock.acquire()
        started = time.monotonic()  # waiting for the device is no part of a trial's cost
        ran = (result for result, _ in self._ran)
        best = min(ran, key=lambda result: result.median_step_seconds or 0.0, default=None)
        limit = pruning_threshold(best) if best else None
        common = (self.model, self.workload, candidate, self.device, self.num_steps)
        request = worker.TrialRequest(*common, limit)
        result = self.classify(candidate, self.send(request, reload_key(candidate)))
        return result.changed(wall_seconds=round(time.monotonic() - started, 3))

    def rehearse(
        self, candidate: Candidate, caching: CachingSettings, max_seconds: float
    ) -> TrialResult:
        """Run a winner through every phase; if a later one fails, what training showed stands."""
        self.lock.acquire()
        started = time.monotonic()
        self.close_child()  # phases are measured from an empty device on
        common = (self.model, self.workload, candidate, self.device, self.num_steps)
        result = self.send(
            rehearsal.RehearsalRequest(
                *common, caching=caching, max_seconds=max_seconds, scratch_folder=self._scratch.name
            )
        )
        if isinstance(result, worker.Failure) and result.partial is not None:
            phases = ", ".join(phase.name for phase in result.partial.phases)
            message = f"confirmed as far as {phases}: {result.message}"
            result = result.partial.changed(message=message)
        confirmed = self.classify(candidate, result)
        return confirmed.changed(confirms=True, wall_seconds=round(time.monotonic() - started, 3))

    def classify(self, candidate: Candidate, result: TrialResult | worker.Failure) -> TrialResult:
        """Judge as the parent: failures become outcomes, spills are found, caps are noted."""
        if isinstance(result, worker.Failure):
            self.close_child()
            return TrialResult(
                candidate=candidate,
                outcome=result.outcome,
                message=result.message,
                host_memory_bytes=result.host_memory_bytes,
                memory_cap_bytes=self.user_cap_bytes,
            )
        result = result.changed(memory_cap_bytes=self.user_cap_bytes)
        if self.device == "cpu" and (why := self._exceeded(result)):
            return result.changed(outcome="oom", message=why)
        seconds = result.median_step_seconds
        if result.outcome != "ok" or seconds is None:
            return result
        predicted = self.predict(candidate).step_seconds if self.predict else seconds
        if why := find_spill(result, predicted, self._ran, self.memory_cap_bytes):
            self.close_child()
            return result.changed(outcome="spill", message=why)
        self._ran.append((result, predicted))
        return result

    def _exceeded(self, result: TrialResult) -> str | None:
        allowed, taken = self.budget_bytes, {"trial": result.host_memory_bytes or 0}
        if result.phases:
            allowed += self.resident_bytes
            taken = {f"{phase.name} phase": phase.host_bytes or 0 for phase in result.phases}
        largest = max(taken, key=lambda name: taken[name])
        if taken[largest] <= allowed:
            return None
        amounts = f"{taken[largest] / 2**20:,.0f} MiB, {allowed / 2**20:,.0f} MiB may be taken"
        return f"the {largest} takes {amounts}"

    def send(
        self, request: Any, key: tuple[Choice, ...] = (), timeout_seconds: float | None = None
    ) -> Any:
        """Return what a child with that `key` makes of a request, or the Failure it ended with."""
        child = self._child_for(key)
        log_start = self._log.stat().st_size
        partial = None
        try:
            child.requests.send(request)
            limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            deadline = time.monotonic() + limit
            while isinstance(result := self._receive(child, deadline), TrialFinished):
                partial = result.result
        except TimeoutError:
            result = worker.Failure("timeout", f"no answer within {limit:.0f} s")
        except (EOFError, OSError):
            result = self._explain_death(child, log_start)
        if isinstance(result, worker.Failure):
            self.close_child()
            result.partial = partial
        if self.lock.has_waiting_search():
            self.close_child()  # the other search must find the device empty
            self.lock.release()
        return result

    def _receive(self, child: _Child, deadline: float) -> Any:
        while not child.requests.poll(POLL_SECONDS):
            if shortage := self.watchdog.find_shortage():
                return worker.Failure(self._host_oom, shortage)
            if time.monotonic() > deadline:
                raise TimeoutError
        return child.requests.recv()

    def _explain_death(self, child: _Child, log_start: int) -> worker.Failure:
        child.process.join(timeout=10)
        code = child.process.exitcode
        if code == -signal.SIGKILL:
            killed = "killed by the system, most likely out of system RAM"
            return worker.Failure(self._host_oom, killed)
        with self._log.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else ""
        if last.startswith(MemoryError.__name__):  # too little memory even to report it
            return worker.Failure("oom", "the trial process had too little memory to work at all")
        cause = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        ran_out = any(word in last for word in ("MemoryError", "bad_alloc"))
        message = f"the trial process died, {cause}{f': {last}' if last else ''}"
        return worker.Failure(self._host_oom if ran_out else "crash", message)

    @property
    def _host_oom(self) -> Outcome:
        return "oom" if self.shares_memory else "host_oom"

    def _cap_bytes(self) -> int:
        # never what the watchdog would end a trial for
        if not self.shares_memory:  # the child asks the card itself
            return self.memory_cap_bytes
        spare = CPU_SPARE_BYTES if self.device == "cpu" else 0
        left = self.watchdog.available() - self.watchdog.floor_bytes
        return max(0, min(self.memory_cap_bytes + spare, left))

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
            process.start()
            theirs.close()
            self._child = _Child(process, ours, key, available)
        return self._child

    def close_child(self) -> None:
        """End the child and all it started, and wait until the host has its memory back."""
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

    def __enter__(self) -> Self:
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


def find_spill(
    result: TrialResult,
    predicted_seconds: float,
    earlier: Sequence[tuple[TrialResult, float]],
    cap_bytes: int,
) -> str | None:
    """Tell why a trial that ran must have gone beyond the device's memory; None if it has not.
    Drivers on Windows and WSL move memory to the host instead of failing, and hosts swap."""
    if result.allocator_retries:
        times = "once" if result.allocator_retries == 1 else f"{result.allocator_retries} times"
        return f"the allocator ran out and started over {times}: a longer run would run out"
    if not earlier or (result.peak_memory_bytes or 0) < NEAR_BUDGET * cap_bytes:
        return None
    known = [(trial.median_step_seconds or 0.0, predicted) for trial, predicted in earlier]
    slowest = max(seconds for seconds, _ in known)
    usual = max(1.0, *(seconds / predicted for seconds, predicted in known))
    now = result.median_step_seconds or 0.0
    ratio = now / predicted_seconds
    if ratio < monitor.SPILL_FACTOR * usual or now < monitor.SPILL_FACTOR * slowest:
        return None
    slow = f"a step took {now:.3g} s, {ratio:.1f} times what was predicted"
    return f"{slow}, at the edge of memory: it spilled"


def pruning_threshold(best: TrialResult) -> float:
    """Find the step seconds above which no trial can win against `best`."""
    median = best.median_step_seconds or 0.0
    ordered = sorted(best.step_seconds)
    spread = (ordered[-1 - len(ordered) // 4] - ordered[len(ordered) // 4]) / median
    return median * max(CLEARLY_SLOWER, 1 + NUM_SPREADS * spread)


def serve(requests: Connection, log: str, limits: MemoryLimits) -> None:
    """Perform requests in the child until the parent closes the pipe, or dies."""
    os.setpgid(0, 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    threading.Thread(target=_exit_with_parent, args=(Path(log).parent,), daemon=True).start()
    if not getattr(sys.modules.get("autotune.search.preload"), "DONE", False):
        importlib.import_module("autotune.search.preload")  # the fork server swallowed its failure
    state = worker.ChildState(report=lambda partial: requests.send(TrialFinished(result=partial)))
    is_capped = False
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        result = _perform(request, state, limits, is_capped)
        is_capped = True
        requests.send(result)
        if isinstance(result, worker.Failure):
            return


def _perform(request: Any, state: worker.ChildState, limits: MemoryLimits, is_capped: bool) -> Any:
    try:
        if not is_capped:
            if candidate := getattr(request, "candidate", None):
                configure_allocator(candidate.allocator)  # before the cap starts CUDA
            cap_memory(limits)
        if workload := getattr(request, "workload", None):
            allow_optimizer(workload.optimizer.name)  # the runner has loaded it
        result = request.perform(state)
        require_within_cap(limits)
        return result
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {worker.first_line_with_notes(error)}"
        kind, host_bytes = worker.classify_error(error), memory.host_peak_bytes()
        return worker.Failure(kind, message, host_memory_bytes=host_bytes)


def _exit_with_parent(scratch_folder: Path) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        shutil.rmtree(scratch_folder, ignore_errors=True)
        os._exit(1)


def cap_memory(limits: MemoryLimits) -> None:
    """Cap this process; on a CPU on top of the libraries that every trial has."""
    device, cap_bytes = torch.device(limits.device), limits.cap_bytes
    if device.type == "cuda":
        processes.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.get_device_properties(device).is_integrated:
            free = total  # `free` leaves out what the kernel would give back: the parent looked
        allowed = max(0, min(cap_bytes + CAP_SLACK_BYTES, free - limits.reserve_bytes))
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    elif device.type == "mps":
        share = cap_bytes / torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(min(1.0, share))
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = psutil.Process().memory_info().data + cap_bytes
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def require_within_cap(limits: MemoryLimits) -> None:
    """Raise MemoryError if this process took more of a card than its cap."""
    device = torch.device(limits.device)
    if device.type != "cuda":
        return
    if (taken := torch.cuda.max_memory_reserved(device)) > limits.cap_bytes:
        amounts = f"{taken / 2**20:,.0f} MiB, {limits.cap_bytes / 2**20:,.0f} MiB may be taken"
        raise MemoryError(f"the allocator took {amounts}")


def _trial_runner(model: ResolvedModel, cost: CostModel) -> ProcessTrialRunner:
    return ProcessTrialRunner(
        cost.hardware,
        model,
        cost.workload,
        budget_bytes=cost.budget_bytes,
        resident_bytes=cost.resident_encoder_bytes,
        predict=cost.single_process().predict,
    )


@contextlib.contextmanager
def run_in_child_processes(model: ResolvedModel, cost: CostModel) -> Iterator[TrialFunction]:
    """Run trials in child processes of this machine."""
    with _trial_runner(model, cost) as runner:
        yield runner.run


def rehearse_in_child_process(
    model: ResolvedModel, cost: CostModel, candidate: Candidate, max_seconds: float
) -> TrialResult:
    """Run a longer trial, through every phase of a run, in a child process."""
    with _trial_runner(model, cost) as runner:
        return runner.rehearse(candidate, cost.caching, max_seconds)
