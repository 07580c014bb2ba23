"""A trial in the child: load what the candidate needs, take real steps, measure how long and how
large they are."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autotune.knobs.modulation_ahead import find_modulation_ahead
from autotune.machine.energy import EnergyMeter, joules_per_image, mean_watts
from autotune.models.family import Batch, Family, Sample
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.trial import TrialResult
from autotune.plan.typical import has_typical_shape, typical_bucket, typical_text_tokens
from autotune.plan.workload import Bucket, Workload
from autotune.search.requests import MIN_METERED_SECONDS, ChildState, TrialRequest
from autotune.system.memory import (
    device_peak_bytes,
    host_peak_bytes,
    measure_peak_memory,
    release_memory,
    reset_host_peak,
)
from autotune.train.model import TrainingModel, apply_settings, load_model
from autotune.train.modulation import ConditionedImage, ModulationWindows, pick_inputs
from autotune.train.monitor import allocator_retries
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import Noising, StepOutcome, live_tensors, optimizer_step, to_device

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
        with EnergyMeter(self.model.device.type, self.model.device.index or 0) as meter:
            before = meter.read()
            while not times or needs_another_step(times):
                outcome, seconds = self.timed_step()
                losses.append(outcome.loss)
                times.append(seconds)
            watts = mean_watts(before, meter.read()) if sum(times) >= MIN_METERED_SECONDS else None
        final_loss = losses[min(len(losses), LOSS_STEP) - 1]
        defect = defect or self.find_defect(outcome)
        lack = ""
        if watts is None and self.workload.objective == "energy":
            lack = f"its energy is unknown: {meter.reason or 'the counter stood still'}"
        return TrialResult(
            candidate=self.candidate,
            outcome="numerics" if defect else "ok",
            step_seconds=tuple(times),
            warmup_seconds=tuple(warmup),
            joules_per_image=joules_per_image(
                watts, statistics.median(times), self.workload.effective_batch_size
            ),
            load_seconds=self.loaded.seconds,
            load_peak_memory_bytes=self.loaded.peak_bytes,
            peak_memory_bytes=peak,
            allocator_retries=allocator_retries(self.model.device) - self.retries_before,
            host_memory_bytes=host_peak_bytes(),
            quantization_error=self.model.quantization_error,
            final_loss=final_loss if math.isfinite(final_loss) else None,
            message=defect or lack,
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
