"""The loop of a run: steps, learning rate, fallbacks, checkpoints, previews and progress."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from autotune.data.batches import BatchLoader, BatchOrder
from autotune.data.encode import EncodedDataset
from autotune.errors import AutotuneError, InvalidInput, Preempted, is_out_of_memory
from autotune.events import Notice, OnEvent, StepFinished
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.registry import reload_key
from autotune.models.family import TORCH_LOCK, Batch
from autotune.plan import candidate, words
from autotune.plan.plan import TrainingPlan
from autotune.system import memory, process
from autotune.train.folder import Checkpoint, Checkpoints
from autotune.train.metrics import Metrics
from autotune.train.model import TrainingModel, apply_settings, eager_eval
from autotune.train.monitor import MORE_TO_SPARE, Monitor, profile_steps
from autotune.train.optimizer import AdapterOptimizer, LearningRate
from autotune.train.processes import Processes
from autotune.train.step import Noising, StepOutcome, make_windows, optimizer_step, to_device
from autotune.train.validation import HeldOutLoss, Validation

EVALUATION_STEPS = 4  # effective batches on which the adapter is judged at the end


class TrainingLoop:
    """The steps of one run, equal for any micro-batch size, processes and interruptions."""

    def __init__(
        self,
        plan: TrainingPlan,
        model: TrainingModel,
        encoded: EncodedDataset,
        checkpoint: Checkpoint | None,
        held_out: EncodedDataset | None = None,
        *,
        processes: Processes,
        checkpoints: Checkpoints,
        monitor: Monitor,
        metrics: Metrics | None,
        on_event: OnEvent,
        preview: Callable[[int], None],
        stop_reason: Callable[[], str | None] = lambda: None,
        trace: Path | None = None,
    ) -> None:
        self.plan, self.model, self.encoded = plan, model, encoded
        self.processes, self.checkpoints, self.monitor = processes, checkpoints, monitor
        self.metrics, self.on_event = metrics, on_event
        self.preview, self.stop_reason, self.trace = preview, stop_reason, trace
        self.settings, self.fallbacks = plan.frozen.settings, plan.frozen.fallbacks
        self.network = model.transformer  # as steps call it: wrapped, with several processes
        job = self.job = plan.job
        order = self.order = BatchOrder(
            groups=encoded.groups,
            repeats=tuple(item.repeats for item in encoded.items),
            effective_batch_size=plan.frozen.workload.effective_batch_size,
            seed=job.seed,
            caption_dropout=job.caption_dropout,
            num_captions=encoded.num_captions,
            flip=job.flip,
            preserve_prior=plan.frozen.workload.preserve_prior,
            num_prior_captions=encoded.num_prior_captions,
        )
        self.num_steps = job.steps_on(order.epoch_size, order.effective_batch_size)
        self.optimizer = AdapterOptimizer(
            model.adapter,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            max_grad_norm=job.max_grad_norm,
            choice=plan.frozen.workload.optimizer,
            ema_decay=plan.frozen.workload.ema_decay,
        )
        self.rate = LearningRate(self.optimizer.inner, job, self.num_steps, order.epoch_steps)
        given = job.timestep_shift
        shift = model.family.shift_at if given == "by_resolution" else given
        noise = job.timestep_sampling, job.weighting_scheme, model.noise
        together = processes.num_shards > 1 and order.preserve_prior > 0
        self.noising = Noising(job.seed, shift, *noise, together, encoded.slider_ends)
        self.windows = make_windows(model, encoded, order, self.noising, processes, self._to_device)
        meter = HeldOutLoss(model, held_out, self.noising, self._to_device) if held_out else None
        self.validation = Validation(
            meter, job, self.num_steps, self.optimizer, processes, checkpoints, monitor, self._warn
        )
        self.first_step = checkpoint.step if checkpoint else 0
        if checkpoint:
            state = checkpoint.state
            try:
                self.optimizer.load_state(checkpoint.tensors, state["optimizer"])
                self.rate.load_state(state["rate"])
                monitor.load_gradient_state(state["gradients"])
                self.validation.load_state(state["validation"])
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                hint = "delete it, or choose another --output"
                step = f"the checkpoint of step {checkpoint.step}"
                raise InvalidInput(f"{step} holds no state of a run", hint=hint) from error
        self.done = self.first_step
        # Measures memory: the second step with the settings in use.
        self.measured_step = self.first_step + 1
        self.peak_bytes = 0
        self.warnings: list[str] = []
        self._first_finish: tuple[float, int] | None = None
        self._cancelled: str | None = None

    def run(self) -> None:
        """Take every remaining step; if memory runs out, go on with safer settings of the plan."""
        is_single = self.processes.world_size == 1
        if not is_single:
            self._replicate()
        self.validation.start(self.settings.micro_batch_size)
        # What stopped the run may have stopped this preview.
        if 0 < self.first_step < self.num_steps:
            self._preview_if_due()
        catching = process.catch_stop_signals(second_ends=is_single)
        with catching as signal_name, profile_steps(self.trace) as trace:
            self.monitor.start()
            while self.done < self.num_steps:
                try:
                    self._take_steps(signal_name, trace)
                    return
                except Exception as error:
                    has_bad_gradient = isinstance(error, GradientNotFinite)
                    if not is_single or not (has_bad_gradient or is_out_of_memory(error)):
                        raise
                    if has_bad_gradient and self.settings.attention in SAFE_ATTENTION:
                        raise
                    safer = self._change_attention if has_bad_gradient else self._fall_back
                safer()  # outside of the handler: the error references what the step had saved

    def _take_steps(
        self, signal_name: Callable[[], str | None], trace: torch.profiler.profile | None
    ) -> None:
        loader = self._make_loader()
        batches = cast("Generator[Batch]", iter(loader))
        with contextlib.closing(batches):
            for step in range(self.done, self.num_steps):
                with TORCH_LOCK:
                    event = self._timed_step(step, batches, loader)
                    self.done = event.step
                    event = self.validation.measure_after(event, self.settings.micro_batch_size)
                self._report(event)
                if trace:
                    trace.step()
                reason = signal_name() or self.stop_reason() or self._cancelled
                stopping = self.processes.is_any(reason is not None)
                self._save_and_preview(stopping=stopping)
                if stopping:
                    where = f"after step {self.done} of {self.num_steps}"
                    what = f"stopped by {reason or 'a signal'} {where}; a checkpoint is written"
                    hint = "go on from there: run the same command with --resume"
                    raise Preempted(what, hint=hint)

    def _make_loader(self) -> BatchLoader:
        settings, processes = self.settings, self.processes
        steps, size = range(self.done, self.num_steps), settings.micro_batch_size
        rank, world_size = processes.rank, processes.world_size
        batches = self.order.batches(steps, size, rank=rank, world_size=world_size)
        workers, is_pinned = settings.data_workers, settings.batch_memory == "pinned"
        return BatchLoader(
            self.encoded.sample,
            batches,
            self.model.collate,
            num_workers=workers,
            pin_memory=is_pinned,
        )

    def _report(self, event: StepFinished) -> None:
        if self.metrics:
            self.metrics.add(event)
        try:
            self.on_event(event)
        except KeyboardInterrupt:
            self._cancelled = "its listener"
        for warning in self.monitor.check(self.reading, event.seconds, event.data_seconds):
            self._warn(warning)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.on_event(Notice(text=warning, level="warning"))

    def _fall_back(self) -> None:
        loaded = reload_key(self.settings)
        fitting = [fallback for fallback in self.fallbacks if reload_key(fallback) == loaded]
        if not fitting:
            none = "the plan names no safer settings that need no reload"
            message = f"memory ran out at step {self.done + 1}, and {none}"
            raise AutotuneError(message, hint=MORE_TO_SPARE)
        self.fallbacks = tuple(fitting[1:])
        self._change_settings(fitting[0], "memory ran out")

    def _change_attention(self) -> None:
        """Take the step again: cuDNN's attention has returned bad gradients at some lengths."""
        self.monitor.num_nonfinite += 1
        kinds = {name: ATTENTION_BACKENDS[name].needs.device_kinds for name in SAFE_ATTENTION}
        safe = (name for name, of in kinds.items() if not of or self.model.device.type in of)
        settings = self.settings.changed(attention=next(safe))
        self._change_settings(settings, "a gradient was not finite")

    def _change_settings(self, settings: candidate.Candidate, why: str) -> None:
        self.optimizer.discard_step()
        memory.release_memory()
        self.monitor.restart()
        self.settings, self.measured_step, self.peak_bytes = settings, self.done + 1, 0
        apply_settings(self.model, settings)
        safer = words.label_of(dict(settings))
        self._warn(f"{why} at step {self.done + 1}; from there on with {safer}")

    def _save_and_preview(self, *, stopping: bool) -> None:
        done, order = self.done, self.order
        every = self.job.checkpoint_every(order.epoch_size, order.effective_batch_size)
        ending = stopping or done == self.num_steps
        is_due = ending or (every and done % every == 0)
        if is_due and self.processes.is_first:
            state = {
                "rate": self.rate.state(),
                "optimizer": self.optimizer.numbers(),
                "gradients": self.monitor.gradient_state(),
                "validation": self.validation.state(),
            }
            if self.metrics:
                self.metrics.sync()
            self.checkpoints.save(done, self.optimizer.state(), state)
        if ending:
            self.checkpoints.finish()
            self.processes.wait()
        else:
            self._preview_if_due()

    def _preview_if_due(self) -> None:
        every = self.job.preview_every
        if every and self.done % every == 0:
            if self.processes.is_sampler:
                with self.optimizer.averaged():
                    self.preview(self.done)
            self.processes.wait()

    def _timed_step(self, step: int, batches: Iterator[Batch], loader: BatchLoader) -> StepFinished:
        waited, rate, started = loader.waited_seconds, self.rate.value, time.perf_counter()
        take = partial(self._step, step, batches)
        if step == self.measured_step:
            live = partial(self.optimizer.live_tensors, self.model.transformer)
            outcome, self.peak_bytes = memory.measure_peak_memory(self.model.device, live, take)
        else:
            outcome = take()
        seconds, waited = time.perf_counter() - started, loader.waited_seconds - waited
        is_single = self.processes.world_size == 1
        can_change = is_single and self.settings.attention not in SAFE_ATTENTION
        # Before anything is written: the newest checkpoint is a good one.
        require_finite(outcome, step + 1, can_change_attention=can_change)
        self.rate.step(outcome.loss)
        norm = None if outcome.overflowed else outcome.gradient_norm
        monitor, self.reading = self.monitor, self.monitor.read()
        monitor.add_gradient(norm)
        return StepFinished(
            step=step + 1,
            num_steps=self.num_steps,
            epoch=step * self.order.effective_batch_size // self.order.epoch_size + 1,
            loss=outcome.loss,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=seconds,
            data_seconds=waited,
            images_per_second=self.order.effective_batch_size / seconds,
            memory_bytes=self.reading.held_bytes,
            reserved_bytes=self.reading.reserved_bytes,
            allocator_retries=self.reading.allocator_retries,
            gpu_utilization=monitor.gpu_utilization(),
            gradient_spikes=monitor.num_spikes,
            nonfinite_gradients=monitor.num_nonfinite,
            overflowed_gradients=monitor.num_overflows,
            loss_scale=outcome.loss_scale,
            remaining_seconds=self._remaining_seconds(step + 1),
        )

    def _remaining_seconds(self, done: int) -> float | None:
        """Estimate by the pace of this start without its first step, which warms up."""
        now = time.perf_counter()
        if self._first_finish is None:
            self._first_finish = now, done
            return None
        started, first = self._first_finish
        return (now - started) / (done - first) * (self.num_steps - done)

    def _step(self, step: int, batches: Iterator[Batch]) -> StepOutcome:
        processes = self.processes
        if self.windows:
            self.windows.prepare(step)
        share = self.order.effective_batch_size // processes.world_size
        return optimizer_step(
            self.model.family,
            self.network,
            self.optimizer,
            self._take_images(share, batches),
            noising=self.noising,
            step=step,
            effective_batch_size=share,
            first_position=processes.rank * share,
            average=processes.average,
        )

    def _replicate(self) -> None:
        """Have the processes average gradients, in an order that is the same after resuming. DDP
        searches for layers without a gradient in every step, if there are any; else it sorts its
        buckets anew after its first backward pass, which is one image's, not a step's."""
        processes, transformer = self.processes, self.model.transformer
        with eager_eval(transformer):
            has_unused = None in torch.autograd.grad(
                self._loss_of_one(transformer), self.model.adapter, allow_unused=True
            )
            self.network = processes.replicate(transformer, has_unused=has_unused)
            if not has_unused:
                self._loss_of_one(self.network).backward()  # type: ignore[no-untyped-call]
                self.optimizer.discard_step()

    def _loss_of_one(self, network: nn.Module) -> Tensor:
        step = min(self.done, self.num_steps - 1)
        rank, world_size = self.processes.rank, self.processes.world_size
        if self.windows:
            self.windows.prepare(step)
        first, *_ = self.order.micro_batches(step, 1, rank=rank, world_size=world_size)
        sample = self.encoded.sample(*first.draws[0])
        batch = self._to_device(self.model.collate([sample]))
        position = rank * (self.order.effective_batch_size // world_size)
        return self.noising.loss(self.model.family, network, batch, step, position)

    def _take_images(self, number: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        while number:
            batch = next(batches)
            number -= len(batch["latents"])
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        device, count = self.model.device, len(batch["latents"])
        on_device = to_device(batch, device, self.model.dtype)
        if (guidance := self.job.guidance_scale) is not None:
            on_device["guidance"] = torch.full((count,), guidance, device=device)
        return on_device

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss on images and noise of the steps after the last."""
        family, transformer, total = self.model.family, self.model.transformer, 0.0
        for step in range(self.num_steps, self.num_steps + EVALUATION_STEPS):
            position = 0
            if self.windows:
                self.windows.prepare(step)
            for planned in self.order.micro_batches(step, self.settings.micro_batch_size):
                samples = [self.encoded.sample(index) for index in planned.indices]
                batch = self._to_device(self.model.collate(samples))
                loss = self.noising.loss(family, transformer, batch, step, position)
                total += float(loss) * planned.weight
                position += len(planned.indices)
        return total / EVALUATION_STEPS


LOWER_LEARNING_RATE = "lower the rate: autotune train PLAN --learning-rate X"
CHECK_WEIGHTS = (
    "no rate has had an effect yet: `autotune weights inspect FILE` counts weights that are "
    "not finite"
)
TRAIN_IN_FP32 = "plan again in fp32: autotune plan --from PLAN --pin precision=fp32"
MIN_LOSS_SCALE = 1.0  # losses that need a smaller one have gradients that fp16 has no numbers for
# Gradients that overflow after eight halvings are more likely wrong than large.
LOW_LOSS_SCALE = 2.0**8
# Both take any mask; what they make not finite, no other backend would.
SAFE_ATTENTION = ("_native_efficient", "_native_math")


class GradientNotFinite(AutotuneError):
    """A gradient that is not finite although the loss is; the adapter was not updated."""


def require_finite(outcome: StepOutcome, number: int, *, can_change_attention: bool) -> None:
    """Raise GradientNotFinite if other attention may help, AutotuneError if nothing would."""
    scale, hint = outcome.loss_scale, LOWER_LEARNING_RATE if number > 1 else CHECK_WEIGHTS
    if scale is not None:
        hint = f"{TRAIN_IN_FP32}; else {hint}"
    if not math.isfinite(outcome.loss):
        why = "" if scale is None else ": probably activations overflow fp16"
        raise AutotuneError(f"the loss is {outcome.loss} at step {number}{why}", hint=hint)
    if scale is not None and outcome.overflowed:
        if scale < MIN_LOSS_SCALE:
            message = f"gradients overflow fp16 at step {number}, unscaled ones too"
            raise AutotuneError(message, hint=hint)
        if scale > LOW_LOSS_SCALE or not can_change_attention:
            return
    if not math.isfinite(outcome.gradient_norm):
        message = f"the norm of the gradient is {outcome.gradient_norm} at step {number}"
        raise GradientNotFinite(message, hint=hint)
