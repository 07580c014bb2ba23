"""The loop of a run: data, steps, learning rate, checkpoints, previews, what is told of each step."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from autotune.data import BatchLoader, EncodedDataset, LoadedBatch, Order
from autotune.errors import AutotuneError, InvalidInput, Preempted
from autotune.families import Batch
from autotune.knobs import reload_key
from autotune.runtime import (
    allocated_bytes,
    catch_stop_signals,
    device_peak_bytes,
    is_out_of_memory,
    measure_peak_memory,
    release_memory,
)
from autotune.schema import Notice, OnEvent, StepFinished, TrainingPlan
from autotune.training.checkpoint import Checkpoint, Checkpoints
from autotune.training.metrics import Metrics
from autotune.training.model import TrainingModel, apply_settings
from autotune.training.monitor import MemoryWatch, Utilization
from autotune.training.processes import Processes
from autotune.training.schedule import LearningRate
from autotune.training.step import AdapterOptimizer, Noising, StepOutcome, live_tensors, optimizer_step, to_device

EVALUATION_STEPS = 4
"""Effective batches on which the losses with and without the adapter are compared at the end."""

LOWER_THE_RATE = "lower the rate: autotune train PLAN --learning-rate X"
NO_RATE_YET = "no rate has had an effect yet: `autotune weights inspect FILE` counts weights that are not finite"

TRACED = range(3, 6)
"""Steps of this start that a trace shows: the first ones allocate and warm up."""


@dataclass(frozen=True)
class RunContext:
    """What the loop works with besides the model."""

    processes: Processes
    checkpoints: Checkpoints
    metrics: Metrics | None
    """None on all processes but the first."""
    on_event: OnEvent
    preview: Callable[[int], None]
    """Called on processes that sample, with the number of steps taken."""
    budget_bytes: int
    trace: Path | None = None


class Loop:
    """The steps of one run: the same order and noise whatever the micro-batch size, processes and interruptions."""

    def __init__(
        self,
        plan: TrainingPlan,
        model: TrainingModel,
        encoded: EncodedDataset,
        checkpoint: Checkpoint | None,
        context: RunContext,
    ) -> None:
        self.plan, self.model, self.encoded, self.context = plan, model, encoded, context
        self.settings = plan.frozen.settings
        """The plan's, or the fallback that memory has made necessary."""
        job = self.job = plan.job
        order = self.order = Order(
            groups=encoded.groups,
            repeats=tuple(item.repeats for item in encoded.items),
            effective_batch_size=plan.frozen.workload.effective_batch_size,
            seed=job.seed,
            caption_dropout=job.caption_dropout,
        )
        self.num_steps = job.steps_on(order.epoch_size, order.effective_batch_size)
        self.optimizer = AdapterOptimizer(
            model.adapter,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            max_grad_norm=job.max_grad_norm,
        )
        self.rate = LearningRate(self.optimizer.adamw, job, self.num_steps, order.epoch_steps)
        self.first_step = 0
        if checkpoint and checkpoint.step > self.num_steps:
            raise InvalidInput(
                f"{checkpoint.step} steps were taken already, and the run is to take {self.num_steps}",
                hint=f"resume with --steps {checkpoint.step} or more, or choose another folder with --output",
            )
        if checkpoint:
            self.first_step = checkpoint.step
            self.optimizer.load_state(checkpoint.tensors)
            self.rate.load_state(checkpoint.state["rate"])
        self.done = self.first_step
        """Steps that this run has taken."""
        self.network = model.transformer
        shift = job.timestep_shift
        by_tokens = model.family.defaults.shift_at if shift == "by_resolution" else shift
        self.noising = Noising(job.seed, by_tokens, job.timestep_sampling, job.weighting_scheme)
        expected = plan.frozen.expected  # on a CPU the whole process is looked at
        promised = expected.required_memory_bytes if model.device.type == "cpu" else expected.peak_memory_bytes
        self.watch = MemoryWatch(context.budget_bytes, promised)
        self.measured_step = self.first_step + 1
        self.peak_bytes = 0
        self.seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.utilization = Utilization(model.device)
        self.warnings: list[str] = []
        self.paced_from: tuple[float, int] | None = None

    def run(self) -> None:
        """Take every step that is left; where memory runs out, go on with the plan's next safer settings.

        Raises:
            Preempted: a signal came; a checkpoint is written.
            AutotuneError: the loss is no longer finite, memory runs out and the plan names nothing safer that needs no
                reload, or a checkpoint cannot be written.
        """
        processes = self.context.processes
        self.network = processes.replicate(self.model.transformer)
        single = processes.world_size == 1
        with catch_stop_signals(second_ends=single) as signal_name, _tracing(self.context.trace) as trace:
            while self.done < self.num_steps:
                try:
                    self._take_steps(signal_name, trace)
                    return
                except Exception as error:
                    if not single or not is_out_of_memory(error):
                        raise
                self._step_down()  # outside of the handler: the error holds what the step had saved

    def _take_steps(self, signal_name: Callable[[], str | None], trace: torch.profiler.profile | None) -> None:
        """Every step that is left, with the settings in use."""
        loader = self._loader()
        batches = cast("Generator[LoadedBatch]", iter(loader))
        with contextlib.closing(batches):
            for step in range(self.done, self.num_steps):
                event = self._timed_step(step, batches, loader)
                self.done = event.step
                self._tell(event)
                if trace:
                    trace.step()
                stopping = self.context.processes.any(signal_name() is not None)
                self._after(stopping=stopping)
                if stopping:
                    raise Preempted(
                        f"stopped by {signal_name() or 'a signal'} after step {self.done} of {self.num_steps}; "
                        "a checkpoint is written",
                        hint="go on from there: run the same command with --resume",
                    )

    def _loader(self) -> BatchLoader:
        return BatchLoader(
            self.model.family,
            self.encoded,
            self.order,
            self.settings.micro_batch_size,
            self.num_steps,
            first_step=self.done,
            rank=self.context.processes.rank,
            world_size=self.context.processes.world_size,
            num_workers=self.settings.data_workers,
            pin_memory=self.settings.batch_memory == "pinned",
        )

    def _tell(self, event: StepFinished) -> None:
        if self.context.metrics:
            self.context.metrics.add(event)
        self.context.on_event(event)
        peak = max(event.memory_bytes, device_peak_bytes(self.model.device) or 0)
        if warning := self.watch.look(event.memory_bytes, peak):
            self._warn(warning)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.context.on_event(Notice(text=warning, level="warning"))

    def _step_down(self) -> None:
        """Turn to the next fallback; the step that ran out is taken again, with the same images and noise."""
        rungs = self.plan.frozen.fallbacks
        later = rungs[rungs.index(self.settings) + 1 :] if self.settings in rungs else rungs
        safer = next((rung for rung in later if reload_key(rung) == reload_key(self.settings)), None)
        if safer is None:
            raise AutotuneError(
                f"memory ran out at step {self.done + 1}, and the plan names no safer settings that need no reload",
                hint="plan again with more to spare: autotune plan --from PLAN --reserve 2GiB",
            )
        self.optimizer.forget()
        release_memory()
        self.settings, self.measured_step, self.peak_bytes = safer, self.done + 1, 0
        apply_settings(self.model, safer)
        self._warn(f"memory ran out at step {self.done + 1}; from there on with {safer.label()}")

    def _after(self, *, stopping: bool) -> None:
        job, context, done, last = self.job, self.context, self.done, self.done == self.num_steps
        due = last or stopping or (job.checkpointing_steps and done % job.checkpointing_steps == 0)
        if due and context.processes.is_first:
            state = {"rate": self.rate.state()}
            context.checkpoints.save(done, self.optimizer.state(), state)
        if stopping or last:
            context.checkpoints.finish()
            context.processes.wait()
        elif job.preview_every and done % job.preview_every == 0 and context.processes.samples:
            context.preview(done)

    def _timed_step(self, step: int, batches: Iterator[LoadedBatch], loader: BatchLoader) -> StepFinished:
        """One step; the second of the settings in use also measures memory."""
        waited, rate, started = loader.waited_seconds, self.rate.value, time.perf_counter()
        if step == self.measured_step:
            live = partial(live_tensors, self.model.transformer, self.optimizer)
            take = partial(self._step, step, batches)
            outcome, self.peak_bytes = measure_peak_memory(self.model.device, live, take)
        else:
            outcome = self._step(step, batches)
        seconds, waited = time.perf_counter() - started, loader.waited_seconds - waited
        for what, value in (("loss", outcome.loss), ("norm of the gradient", outcome.gradient_norm)):
            if not math.isfinite(value):  # before anything is written: the newest checkpoint is a good one
                raise AutotuneError(
                    f"the {what} is {value} at step {step + 1}",
                    hint=LOWER_THE_RATE if step else NO_RATE_YET,
                )
        self.rate.step(outcome.loss)
        self.seconds.append(seconds)
        self.data_seconds.append(waited)
        return StepFinished(
            step=step + 1,
            num_steps=self.num_steps,
            loss=outcome.loss,
            learning_rate=rate,
            gradient_norm=outcome.gradient_norm,
            seconds=seconds,
            data_seconds=waited,
            images_per_second=self.order.effective_batch_size / seconds,
            memory_bytes=allocated_bytes(self.model.device),
            gpu_utilization=self.utilization.read(),
            remaining_seconds=self._remaining_seconds(step + 1),
        )

    def _remaining_seconds(self, done: int) -> float | None:
        """As this start has gone since its first step, which warms up."""
        now = time.perf_counter()
        if self.paced_from is None:
            self.paced_from = now, done
            return None
        started, first = self.paced_from
        return (now - started) / (done - first) * (self.num_steps - done)

    def _step(self, step: int, batches: Iterator[LoadedBatch]) -> StepOutcome:
        processes = self.context.processes
        share = self.order.effective_batch_size // processes.world_size
        return optimizer_step(
            self.model.family,
            self.network,
            self.optimizer,
            self._one_step(batches),
            noising=self.noising,
            step=step,
            effective_batch_size=share,
            first_position=processes.rank * share,
            average=processes.average,
        )

    def _one_step(self, batches: Iterator[LoadedBatch]) -> Iterator[Batch]:
        for loaded in batches:
            yield self._on_device(loaded.batch)
            if loaded.is_last:
                return

    def _on_device(self, batch: Batch) -> Batch:
        moved = to_device(batch, self.model.device, self.model.dtype)
        if (guidance := self.job.guidance_scale) is not None:
            moved["guidance"] = torch.full((len(batch["latents"]),), guidance, device=self.model.device)
        return moved

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the images and noise of the next steps, which training has not seen; the same every time."""
        family, transformer, total = self.model.family, self.model.transformer, 0.0
        for step in range(self.num_steps, self.num_steps + EVALUATION_STEPS):
            position = 0
            for planned in self.order.micro_batches(step, self.settings.micro_batch_size):
                batch = self._on_device(family.collate([self.encoded.sample(index) for index in planned.indices]))
                total += float(self.noising.loss(family, transformer, batch, step, position)) * planned.weight
                position += len(planned.indices)
        return total / EVALUATION_STEPS


def _tracing(path: Path | None) -> contextlib.AbstractContextManager[torch.profiler.profile | None]:
    """A profile whose `step` is called after each step of this start; those in `TRACED` are written to `path`."""
    if path is None:
        return contextlib.nullcontext()
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=TRACED.start - 1, warmup=1, active=len(TRACED), repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        record_shapes=True,
    )
