"""The child process: runs candidates for a few real steps and reports what happened, in its own words' place.

It owns its process group, so that the parent can end it whole, and ends itself when the parent is gone. After a
failure that may have left the device in disorder it exits, and the parent starts a fresh one.
"""

import gc
import math
import os
import resource
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.schema import Candidate, Outcome, TrialResult, Workload

if TYPE_CHECKING:
    import torch

    from autotune.training.model import TrainingModel
    from autotune.training.step import StepOutcome


SETTLED_SPREAD = 0.1
"""Of the median: steps whose middle half differs by more are repeated, as on a machine that others use."""
MOST_REPEATS = 4
EXTRA_SECONDS = 5.0
"""No further steps once the timed ones have taken this long."""


@dataclass(frozen=True)
class TrialRequest:
    """One candidate to run. Plain data: it crosses a process boundary."""

    model: str
    """What the user calls the model."""
    workload: Workload
    candidate: Candidate
    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    num_steps: int
    """Steady optimizer steps to time."""
    memory_cap_bytes: int
    """More than this and the trial is out of memory, whatever the machine would allow."""


def serve(requests: Connection, log: str) -> None:
    """Answer trial requests until the parent closes the pipe."""
    os.setpgid(0, 0)
    _redirect_output(log)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _require_preload()
    runner = _Runner()
    while True:
        try:
            request: TrialRequest = requests.recv()
        except EOFError:
            return
        result = runner.run(request)
        requests.send(result)
        if result.outcome not in ("ok", "numerics"):
            return


def _redirect_output(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _require_preload() -> None:
    preload = sys.modules.get("autotune.trials.preload")
    if not getattr(preload, "DONE", False):
        import autotune.trials.preload  # noqa: F401 - shows the error that the fork server swallowed


def _cap_memory(device: "torch.device", cap_bytes: int) -> None:
    import torch

    from autotune.training.memory import make_current

    if device.type == "cuda":
        make_current(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
    elif device.type == "cpu" and sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))


class _Runner:
    """Keeps a loaded model between candidates that differ only in settings that need no reload."""

    def __init__(self) -> None:
        self.loaded: TrainingModel | None = None
        self.load_seconds: float | None = None

    def run(self, request: TrialRequest) -> TrialResult:
        try:
            return self._run(request)
        except BaseException as error:
            traceback.print_exc()
            return TrialResult(
                candidate=request.candidate,
                outcome=classify(error),
                host_memory_bytes=_peak_host_bytes(),
                message=f"{type(error).__name__}: {_first_line(error)}",
            )

    def _run(self, request: TrialRequest) -> TrialResult:
        import torch

        from autotune.families.resolve import resolve_model
        from autotune.training.memory import peak_memory_bytes
        from autotune.training.model import apply_settings, load_model, synthetic_samples

        device = torch.device(request.device)
        if self.loaded is None:
            _cap_memory(device, request.memory_cap_bytes)
            started = time.perf_counter()
            model = resolve_model(request.model)
            self.loaded = load_model(model, request.workload, request.candidate, device, seed=0)
            self.samples = synthetic_samples(
                model, request.workload, request.workload.effective_batch_size, self.loaded.dtype
            )
            self.initial = [parameter.detach().clone() for parameter in self.loaded.adapter]
            self.load_seconds = time.perf_counter() - started
        apply_settings(self.loaded, request.candidate)
        trial = _Trial(self.loaded, self.samples, self.initial, request)
        # The first step allocates the optimizer's state; the second is measured for memory, which can slow it down.
        _, warmup = trial.timed_step()
        peak = peak_memory_bytes(device, trial.live_tensors(), trial.step)
        times: list[float] = []
        while len(times) < request.num_steps or _unsettled(times, request.num_steps):
            outcome, seconds = trial.timed_step()
            times.append(seconds)
            if len(times) == request.num_steps:
                final_loss = outcome.loss  # of the same step in every trial, however many repeats follow
        reason = trial.broken(outcome)
        del trial
        gc.collect()
        return TrialResult(
            candidate=request.candidate,
            outcome="numerics" if reason else "ok",
            step_seconds=tuple(times),
            warmup_seconds=(warmup,),
            load_seconds=self.load_seconds,
            peak_memory_bytes=peak,
            host_memory_bytes=_peak_host_bytes(),
            final_loss=final_loss if math.isfinite(final_loss) else None,
            message=reason or "",
        )


def _unsettled(times: list[float], num_steps: int) -> bool:
    """Whether the steps disagree so much that a few more are worth their time."""
    middle = sorted(times)[len(times) // 4 : -(len(times) // 4) or None]
    disagree = max(middle) - min(middle) > SETTLED_SPREAD * middle[len(middle) // 2]
    return disagree and len(times) < MOST_REPEATS * num_steps and sum(times) < EXTRA_SECONDS


class _Trial:
    """One candidate's steps, on training's own step function."""

    def __init__(
        self,
        model: "TrainingModel",
        samples: "list[dict[str, torch.Tensor]]",
        initial: "list[torch.Tensor]",
        request: TrialRequest,
    ) -> None:
        from autotune.training.step import AdapterOptimizer

        self.model, self.request = model, request
        for parameter, value in zip(model.adapter, initial, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        self.optimizer = AdapterOptimizer(model.adapter, learning_rate=1e-4, weight_decay=0.0, max_grad_norm=1.0)
        size = request.candidate.micro_batch_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        self.batches = [
            {name: tensor.to(model.device) for name, tensor in model.family.collate(group).items()} for group in groups
        ]
        self.step_number = 0

    def step(self) -> "StepOutcome":
        from autotune.training.step import optimizer_step

        self.step_number += 1
        return optimizer_step(
            self.model.family,
            self.model.transformer,
            self.optimizer,
            self.batches,
            effective_batch_size=self.request.workload.effective_batch_size,
            seed=0,
            step=self.step_number,
        )

    def timed_step(self) -> "tuple[StepOutcome, float]":
        # The loss is read back inside the step, so the device has finished when it returns.
        started = time.perf_counter()
        outcome = self.step()
        return outcome, time.perf_counter() - started

    def live_tensors(self) -> "list[torch.Tensor]":
        """Everything that stays on the device between steps."""
        from autotune.training.memory import live_tensors

        batches = [tensor for batch in self.batches for tensor in batch.values()]
        return [*live_tensors(self.model.transformer, self.optimizer), *batches]

    def broken(self, outcome: "StepOutcome") -> str | None:
        """Why what was computed cannot be training: a non-finite loss, or layers that never moved."""
        if not math.isfinite(outcome.loss):
            return "the loss is not finite"
        unmoved = sum(1 for master in self.optimizer.masters if not self.optimizer.adamw.state.get(master))
        if outcome.gradient_norm == 0 or unmoved:
            return f"no gradient reached {unmoved or 'any'} adapter tensors: this attention has no backward pass"
        return None


def classify(error: BaseException) -> Outcome:
    """The outcome that an exception amounts to."""
    import torch

    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "oom"
    if "out of memory" in text:
        return "oom"
    if isinstance(error, NotImplementedError | ImportError) or "not supported" in text or "not implemented" in text:
        return "unsupported"
    return "crash"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


def _peak_host_bytes() -> int:
    """Largest resident memory of this process so far. A forked child starts with its parent's pages."""
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
