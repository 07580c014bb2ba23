"""The child process of trials: performs requests, and sends back what came of each or how it
failed.

It leads a process group, so that the parent can end it with all it started, and ends itself when
the parent is gone. After a failure, which may have left the device in disorder, it exits, and the
parent starts a fresh one. A trial loads what its candidate needs and takes real steps by training's
own function.
"""

import importlib
import math
import os
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from autotune.errors import first_line, is_out_of_memory
from autotune.knobs.modulation import find_modulation_ahead
from autotune.knobs.settings import allow_optimizer, configure_allocator
from autotune.models.family import Batch, Family, Sample
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate, Outcome, TrialResult
from autotune.plan.job import ModelRef
from autotune.plan.workload import (
    Bucket,
    Workload,
    has_typical_shape,
    typical_bucket,
    typical_text_tokens,
)
from autotune.system.memory import (
    device_peak_bytes,
    host_peak_bytes,
    measure_peak_memory,
    release_memory,
    reset_host_peak,
)
from autotune.train.model import QualityMissed, TrainingModel, apply_settings, load_model
from autotune.train.monitor import allocator_retries
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.processes import set_device
from autotune.train.step import (
    ConditionedImage,
    ModulationWindows,
    Noising,
    StepOutcome,
    live_tensors,
    optimizer_step,
    pick_inputs,
    to_device,
)

MAX_SPREAD = 0.1
"""Relative to the median: steps whose middle half differs by more are repeated, as on a machine
that others use."""
MAX_REPEATS = 4
MIN_PRUNING_STEPS = 2
"""The step after the one that is measured for memory is cold: on a CPU it took up to 1.6 times
the next ones."""
MAX_REPEAT_SECONDS = 5.0
"""No step is repeated once the timed ones have taken this long."""


def classify_error(error: BaseException) -> Outcome:
    """The outcome that an exception stands for."""
    if isinstance(error, QualityMissed):
        return "numerics"
    if is_out_of_memory(error):
        return "oom"
    text = str(error).lower()
    if (
        isinstance(error, NotImplementedError | ImportError)
        or "not supported" in text
        or "not implemented" in text
    ):
        return "unsupported"
    return "crash"


def first_line_with_notes(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters, and the notes on where it
    happened."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (first_line(error)[:200] or "no message") + notes


@dataclass(frozen=True)
class TrialRequest:
    """Run one candidate for a few steps on the child's model, which the first request loads.
    Gives a TrialResult."""

    model: ModelRef
    workload: Workload
    candidate: Candidate
    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    num_steps: int
    """Steady optimizer steps to time."""
    prune_above_seconds: float | None = None
    """Two steady steps slower than this end the trial: other candidates are clearly faster."""

    def needs_another_step(self, seconds: list[float]) -> bool:
        """Whether another step is worth its time after steady ones that took `seconds`."""
        enough = len(seconds) >= MIN_PRUNING_STEPS
        if (
            enough
            and self.prune_above_seconds is not None
            and min(seconds) > self.prune_above_seconds
        ):
            return False
        return len(seconds) < self.num_steps or self._is_unsteady(seconds)

    def _is_unsteady(self, seconds: list[float]) -> bool:
        middle = sorted(seconds)[len(seconds) // 4 : -(len(seconds) // 4) or None]
        disagree = max(middle) - min(middle) > MAX_SPREAD * middle[len(middle) // 2]
        return (
            disagree
            and len(seconds) < MAX_REPEATS * self.num_steps
            and sum(seconds) < MAX_REPEAT_SECONDS
        )


@dataclass(frozen=True)
class Failure:
    """How a request ended without a result."""

    outcome: Outcome
    message: str
    host_memory_bytes: int | None = None
    """Largest resident memory of the child; None if it did not live to say."""
    partial: Any = None
    """The last partial result that the child reported."""


@dataclass
class ChildState:
    """Kept by a trial process between requests: the loaded model."""

    report: Callable[[Any], None] = lambda partial: None
    """Sends a partial result to the parent, which falls back on it should the child fail."""
    cache: dict[str, Any] = field(default_factory=dict)
    """What one request has built and the next ones use again, such as the loaded model."""
    is_capped: bool = False
    """Whether the limit on the child's memory is set."""


@dataclass(frozen=True)
class MemoryLimits:
    """How much memory a child may take, whatever the machine would allow."""

    device: str
    """torch's name of the device, e.g. `cuda:0`."""
    cap_bytes: int
    reserve_bytes: int
    """Part of a card's free memory that is left alone when the child starts."""


def serve(requests: Connection, log: str, limits: MemoryLimits) -> None:
    """Perform requests until the parent closes the pipe.

    Sends any number of (False, partial result) and then (True, result) for each. Should the parent
    die, the folder that holds `log` is removed.
    """
    os.setpgid(0, 0)
    _redirect_output(log)
    threading.Thread(target=_exit_with_parent, args=(Path(log).parent,), daemon=True).start()
    _require_preload()
    state = ChildState(report=lambda partial: requests.send((False, partial)))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        result = _perform(request, state, limits)
        requests.send((True, result))
        if isinstance(result, Failure):
            return


def _perform(request: Any, state: ChildState, limits: MemoryLimits) -> Any:
    try:
        if not state.is_capped:
            if candidate := getattr(request, "candidate", None):
                configure_allocator(candidate.allocator)  # before the cap starts CUDA
            cap_memory(limits)
            state.is_capped = True
        if workload := getattr(request, "workload", None):
            allow_optimizer(workload.optimizer.name)  # the runner has loaded it
        result = TASKS[type(request)](request, state)
        require_within_cap(limits)
        return result
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {first_line_with_notes(error)}"
        return Failure(classify_error(error), message, host_peak_bytes())


def _redirect_output(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _exit_with_parent(scratch_folder: Path) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        shutil.rmtree(scratch_folder, ignore_errors=True)
        os._exit(1)


def _require_preload() -> None:
    """Raise what the preload failed with, which the fork server has swallowed."""
    preload = sys.modules.get("autotune.search.preload")
    if not getattr(preload, "DONE", False):
        importlib.import_module("autotune.search.preload")


CAP_SLACK_BYTES = 1 << 30
"""CUDA's allocator holds a whole request against the cap, though an expandable segment has part
of it already (c10/cuda/CUDACachingAllocator.cpp, `alloc_block`): the largest tensors of a step
would end a trial that fits. What a trial really took is held against the cap when it has run."""


def cap_memory(limits: MemoryLimits) -> None:
    """Let this process take no more than `limits` and, on a card, than is free now: other processes
    may have started.

    On a card it may take somewhat more, `CAP_SLACK_BYTES`, if that is free. On a CPU the cap comes
    on top of the libraries that every trial has.
    """
    device, cap_bytes = torch.device(limits.device), limits.cap_bytes
    if device.type == "cuda":
        set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.get_device_properties(device).is_integrated:
            # the free memory leaves out what the kernel would give back; the parent has looked at
            # that
            free = total
        allowed = max(0, min(cap_bytes + CAP_SLACK_BYTES, free - limits.reserve_bytes))
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(
            min(1.0, cap_bytes / torch.mps.recommended_max_memory())
        )
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = psutil.Process().memory_info().data + cap_bytes
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard),
        )


def require_within_cap(limits: MemoryLimits) -> None:
    """Raise MemoryError if this process took more of a card than its cap, whose enforcement
    leaves some slack."""
    device = torch.device(limits.device)
    if (
        device.type == "cuda"
        and (taken := torch.cuda.max_memory_reserved(device)) > limits.cap_bytes
    ):
        amounts = f"{taken / 2**20:,.0f} MiB, {limits.cap_bytes / 2**20:,.0f} MiB may be taken"
        raise MemoryError(f"the allocator took {amounts}")


MAX_OVERFLOWS = 17
"""Steps after which a loss scale that begins at 2**16 and halves is below 1: no smaller one
helps."""
LOSS_STEP = 3
"""Number of the steady step whose loss is reported, so that losses of trials compare however
many steps each took."""


@dataclass
class LoadedModel:
    """A model in memory, shared by candidates that differ only in settings that need no reload."""

    model: TrainingModel
    largest: list[Sample]
    """One effective batch in the largest shapes: it decides memory."""
    typical: list[Sample]
    """One effective batch in the usual shapes: it decides speed. The same list if they are about
    the largest."""
    initial: list[torch.Tensor]
    """Values of the adapter that every candidate begins with."""
    windows: ModulationWindows | None
    """Windows of modulations that are computed ahead; None if their layers are resident."""
    seconds: float
    peak_bytes: int | None
    """Peak of device memory while loading; None on CPU, where the process's memory tells."""


def run_trial(request: TrialRequest, child: ChildState) -> TrialResult:
    """Run the candidate on the child's model, which is loaded by the first request."""
    reset_host_peak()  # what earlier candidates took is not this one's
    if "loaded" not in child.cache:
        child.cache["loaded"] = load_for_trial(request)
    try:
        steps = StepRunner(child.cache["loaded"], request.workload, request.candidate)
        return steps.measure(request.needs_another_step)
    finally:
        release_memory()  # the next candidate must not find the allocator full of this one's blocks


def load_for_trial(request: TrialRequest) -> LoadedModel:
    """Load the transformer under the candidate's settings, with an adapter and random samples."""
    device, workload = torch.device(request.device), request.workload
    started = time.perf_counter()
    resolved = resolve_model(request.model)
    model = load_model(resolved, workload, request.candidate, device, seed=0)
    known, size = (resolved.family, resolved.config, workload), workload.effective_batch_size
    largest = synthetic_samples(
        *known, workload.largest_bucket, longest_captions(workload, size), model.dtype
    )
    typical = largest
    if has_typical_shape(workload):
        typical = synthetic_samples(
            *known, typical_bucket(workload), typical_text_tokens(workload), model.dtype
        )
        # The modulations of a window are those of both.
        typical = [
            {**sample, **pick_inputs(model, like)}
            for sample, like in zip(typical, largest, strict=True)
        ]
    images = [
        ConditionedImage(tuple(sample["latents"].shape), pick_inputs(model, sample))
        for sample in largest
    ]
    ahead, place = (
        find_modulation_ahead(model.transformer),
        partial(to_device, device=device, dtype=model.dtype),
    )
    windows = None
    if ahead:
        windows = ModulationWindows(
            model, ahead, Noising(process=model.noise), lambda _: images, size, 0, place
        )
    initial = [parameter.detach().clone() for parameter in model.adapter]
    return LoadedModel(
        model,
        largest,
        typical,
        initial,
        windows,
        time.perf_counter() - started,
        device_peak_bytes(device),
    )


def longest_captions(workload: Workload, count: int) -> list[int]:
    """Lengths in tokens. With masked padding every second is one shorter, so that batches carry
    training's mask."""
    return [
        max(1, workload.max_text_tokens - (workload.text_padding == "masked" and i % 2))
        for i in range(count)
    ]


def synthetic_samples(
    family: Family,
    config: Mapping[str, Any],
    workload: Workload,
    bucket: Bucket,
    text_tokens: Sequence[int],
    dtype: torch.dtype,
) -> list[Sample]:
    """Random samples in the shape of `bucket`, one for each caption length in `text_tokens`."""
    shapes = family.sample_shapes(config, bucket, max(text_tokens), workload.num_control_images)
    generator = torch.Generator().manual_seed(0)
    samples = [
        {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for _ in text_tokens
    ]
    for sample, length in zip(samples, text_tokens, strict=True):
        sample["prompt_embeds"] = sample["prompt_embeds"][:length]
    return samples


class StepRunner:
    """Takes a candidate's optimizer steps by training's own step function."""

    def __init__(self, loaded: LoadedModel, workload: Workload, candidate: Candidate) -> None:
        model = self.model = loaded.model
        self.loaded, self.workload, self.candidate = loaded, workload, candidate
        self.retries_before = allocator_retries(model.device)
        apply_settings(model, candidate)
        for parameter, value in zip(model.adapter, loaded.initial, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        rates = {"learning_rate": 1e-4, "weight_decay": 0.0, "max_grad_norm": 1.0}
        self.optimizer = AdapterOptimizer(
            model.adapter, **rates, choice=workload.optimizer, ema_decay=workload.ema_decay
        )
        self.batches = self._batches(loaded.largest)
        self.step_number = 0

    def measure(self, needs_another_step: Callable[[list[float]], bool]) -> TrialResult:
        """Take steps, at least one steady one, while `needs_another_step` of the steady ones'
        seconds.

        Memory of compiled settings is that of the graph for the first shape, here the largest,
        which a run may take through the graph for all others.
        """
        # The first step allocates the optimizer's state, unless its gradient overflows; the one
        # after it is measured for memory, which can slow it down.
        outcome, first = self.timed_step()
        warmup = [first]
        while outcome.overflowed and len(warmup) < MAX_OVERFLOWS:
            outcome, seconds = self.timed_step()
            warmup.append(seconds)
        defect = "gradients overflow fp16 at any loss scale" if outcome.overflowed else None
        peak, second = self.memory_step()
        warmup.append(second)
        if self.loaded.typical is not self.loaded.largest:
            self.batches = self._batches(self.loaded.typical)
            warmup.append(self.timed_step()[1])
        times: list[float] = []
        losses: list[float] = []
        while not times or needs_another_step(times):
            outcome, seconds = self.timed_step()
            losses.append(outcome.loss)
            times.append(seconds)
        final_loss = losses[min(len(losses), LOSS_STEP) - 1]
        defect = defect or self.find_defect(outcome)
        return TrialResult(
            candidate=self.candidate,
            outcome="numerics" if defect else "ok",
            step_seconds=tuple(times),
            warmup_seconds=tuple(warmup),
            load_seconds=self.loaded.seconds,
            load_peak_memory_bytes=self.loaded.peak_bytes,
            peak_memory_bytes=peak,
            allocator_retries=allocator_retries(self.model.device) - self.retries_before,
            host_memory_bytes=host_peak_bytes(),
            quantization_error=self.model.quantization_error,
            final_loss=final_loss if math.isfinite(final_loss) else None,
            message=defect or "",
        )

    def _batches(self, samples: Sequence[Sample]) -> list[Batch]:
        size = self.candidate.micro_batch_size
        batches = [
            self.model.collate(samples[start : start + size])
            for start in range(0, len(samples), size)
        ]
        if self.candidate.batch_memory == "pinned":
            return [
                {name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches
            ]
        return batches

    def step(self) -> StepOutcome:
        """Take one optimizer step; each micro-batch is copied to the device when its turn comes,
        as in training."""
        self.step_number += 1
        return optimizer_step(
            self.model.family,
            self.model.transformer,
            self.optimizer,
            (to_device(batch, self.model.device, self.model.dtype) for batch in self.batches),
            noising=Noising(process=self.model.noise),
            step=self.step_number,
            effective_batch_size=self.workload.effective_batch_size,
        )

    def _prepare_modulation(self) -> float:
        """Have the next step's modulations ready; returns its share of the seconds that their
        window took."""
        windows = self.loaded.windows
        if windows is None:
            return 0.0
        windows.prepare(self.step_number + 1)
        return windows.share_seconds

    def timed_step(self) -> tuple[StepOutcome, float]:
        """Take a step; its outcome and seconds. The loss is read back, so the device has
        finished when it returns."""
        share = self._prepare_modulation()
        started = time.perf_counter()
        outcome = self.step()
        return outcome, time.perf_counter() - started + share

    def memory_step(self) -> tuple[int, float]:
        """Take a step; its peak of memory in bytes, and its seconds."""
        self._prepare_modulation()
        started = time.perf_counter()
        _, peak = measure_peak_memory(self.model.device, self._live_tensors, self.step)
        return peak, time.perf_counter() - started

    def _live_tensors(self) -> list[torch.Tensor]:
        batches = (tensor for batch in self.batches for tensor in batch.values())
        return [*live_tensors(self.model.transformer, self.optimizer), *batches]

    def find_defect(self, outcome: StepOutcome) -> str | None:
        """Why the steps cannot be training: a non-finite loss, or layers that no gradient reached;
        None if they can.

        Some layers of the last block may stay still (`Family.last_block`): what has no backward
        pass shows in all.
        """
        if not math.isfinite(outcome.loss):
            return "the loss is not finite"
        last = {
            id(parameter)
            for parameter in self.model.family.blocks(self.model.transformer)[-1].parameters()
        }
        pairs = zip(self.optimizer.parameters, self.optimizer.masters, strict=True)
        state = self.optimizer.inner.state
        still = [
            master
            for parameter, master in pairs
            if id(parameter) not in last and not state.get(master)
        ]
        unmoved = len(still) if any(state.values()) else 0  # plain SGD has no state at all
        if outcome.gradient_norm == 0 or unmoved:
            return f"no gradient reached {unmoved or 'any'} adapter tensors"
        return None


TASKS: dict[type, Callable[[Any, ChildState], Any]] = {TrialRequest: run_trial}
"""Type of request: the function that performs it in the child. What it returns crosses to the
parent."""
