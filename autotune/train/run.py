"""`autotune train`: runs exactly what a plan says, and compares it with the prediction."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from autotune import errors, events
from autotune.data.cache import Cache, MemoryCache
from autotune.data.encode import EncodedDataset, Encoders, encode_dataset, list_entries
from autotune.data.items import tell_cut_captions
from autotune.data.pixels import has_video_decoder
from autotune.knobs.quantized_layers import torch_dtype
from autotune.knobs.settings import configure_allocator
from autotune.models.family import TORCH_LOCK
from autotune.plan.base import digest_of, log_event
from autotune.plan.file import RUN_PLAN_FILE, save_plan
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import AdapterVerdict, RunReport, TrainingPlan
from autotune.system import files, process
from autotune.train import folder, sample
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import Metrics, Steps, read_metrics
from autotune.train.model import TrainingModel, eager_eval, load_model, save_trained
from autotune.train.monitor import NUM_WARMUP_STEPS, Monitor
from autotune.train.prepare import PreparedRun, RunInputs, prepare
from autotune.train.processes import Processes, explain_lost_peer, init_distributed
from autotune.train.watchdog import Watchdog

TRACE_FILE = "trace.json"
# What a pipeline may raise that training need not end for.
PREVIEW_ERRORS = (
    sample.PreviewTooLarge, errors.InvalidInput, RuntimeError, TypeError, ValueError, LookupError
)  # fmt: skip


def train(
    plan: TrainingPlan,
    hardware: HardwareProfile,
    cache_folder: Path,
    on_event: events.OnEvent = log_event,
    *,
    resume: bool = False,
    trace: bool = False,
    inputs: RunInputs | None = None,
) -> RunReport:
    """Train what the plan says; with `resume`, from the newest checkpoint if there is one. Resuming
    a finished run returns its report. `inputs` are what `read_inputs` has read already."""
    started = time.monotonic()
    prepared = prepare(plan, hardware, resume=resume, inputs=inputs)
    configure_allocator(plan.frozen.settings.allocator)  # before anything is allocated
    hint = "free some space, then go on from the last checkpoint: --resume"
    try:
        with errors.reraise_disk_full(prepared.output, hint=hint), errors.reraise_oom():
            device = torch.device(hardware.device.torch_name)
            processes = init_distributed(plan.frozen.hardware, device)
            with explain_lost_peer(), Watchdog.of_device(hardware.device.memory_kind) as watchdog:
                on_event = on_event if processes.is_first else events.ignore_event
                common = {
                    **folder.list_fixed_fields(plan),
                    "weights": prepared.weights,
                    "resume": resume,
                }
                processes.require_same("the plan, its job or the model", digest_of(common))
                dataset = prepared.data.training
                if resume and (
                    report := processes.share(lambda: folder.finished_report(plan, dataset))
                ):
                    taken = f"this run has taken all of its {report.num_steps} steps"
                    on_event(events.Notice(text=f"{taken}: nothing is left to do"))
                    return report
                here, system = hardware.device, hardware.host.memory_model
                monitor = Monitor.of_run(processes.device, here, system, plan.frozen)
                run = _Run(plan, prepared, cache_folder, on_event, processes, watchdog, monitor)
                return run.train(started, resume=resume, trace=trace)
    finally:
        prepared.lock.release()


class _Run:
    def __init__(
        self,
        plan: TrainingPlan,
        prepared: PreparedRun,
        cache_folder: Path,
        on_event: events.OnEvent,
        processes: Processes,
        watchdog: Watchdog,
        monitor: Monitor,
    ) -> None:
        self.plan, self.prepared, self.output = plan, prepared, prepared.output
        self.processes, self.on_event = processes, on_event
        self.watchdog, self.monitor = watchdog, monitor
        self.cache = (MemoryCache if plan.job.cache == "memory" else Cache)(cache_folder)
        self.warnings: list[str] = []
        self.adapter_file, self.item_seconds = folder.ADAPTER_FILE, 0.0
        self.metrics: Metrics | None = None
        settings = plan.frozen.settings
        encoding = prepared.model, plan.frozen.caching, processes.device
        self.encoders = Encoders(*encoding, settings.precision, settings.loader)
        self.sampler = sample.PreviewSampler(self.encoders, self._warn)
        self.previews = self._list_previews() if self.processes.is_sampler else []

    def train(self, started: float, *, resume: bool, trace: bool) -> RunReport:
        plan, job, processes = self.plan, self.plan.job, self.processes
        if resume:
            processes.share(self._require_same_run)
        with self.monitor.phase("caching"), TORCH_LOCK:
            encoded, held_out = self._encode()
        run_key = folder.compute_run_key(plan, encoded.items, encoded.entries)
        epoch_size = sum(item.repeats for item in encoded.items)
        batch = plan.frozen.workload.effective_batch_size
        every = job.checkpoint_every(epoch_size, batch)
        processes.require_same("the data, images or captions,", run_key)
        with folder.Checkpoints(
            self.output / folder.CHECKPOINTS,
            run_key,
            keep_last=job.checkpoints_total_limit,
            keep_every=job.checkpoints_keep_every * every,
            weights=self.prepared.weights,
        ) as checkpoints:
            # Refused before anything is loaded.
            newest = partial(checkpoints.newest, self._notify)
            checkpoint = processes.share(newest) if resume else None
            first_step = checkpoint.step if checkpoint else 0
            num_steps = job.steps_on(epoch_size, batch)
            if first_step > num_steps:
                hint = f"resume with --steps {first_step} or more, or choose another --output"
                taken = f"{first_step} steps were taken already"
                raise errors.InvalidInput(f"{taken}, and the run is to take {num_steps}", hint=hint)
            with self.monitor.phase("loading"), TORCH_LOCK:
                trained = self._load()
                processes.wait()
            name = f"training from step {first_step}" if checkpoint else "training"
            self.on_event(events.PhaseStarted(name=name))
            if processes.is_first:
                self.metrics = Metrics(self.output, first_step, job.report_to, self._warn)
            metrics = self.metrics
            closing = contextlib.closing(metrics) if metrics else contextlib.nullcontext()
            with closing, self.monitor.phase("training"):
                loop = TrainingLoop(
                    plan,
                    trained,
                    encoded,
                    checkpoint,
                    held_out,
                    processes=processes,
                    checkpoints=checkpoints,
                    metrics=metrics,
                    on_event=self.on_event,
                    preview=self._sample_previews,
                    stop_reason=lambda: self.watchdog.stop_reason,
                    monitor=self.monitor,
                    trace=self.output / TRACE_FILE if trace and processes.is_first else None,
                )
                with self.watchdog.finishing_steps():
                    loop.run()
        is_single = processes.world_size == 1
        stopping = process.preempt_on_signal(second_ends=is_single)
        with eager_eval(trained.transformer), stopping, TORCH_LOCK:
            report = self._finish(loop, started)
        return processes.share(lambda: report)

    def _require_same_run(self) -> None:
        """Refuse another run's checkpoints before encoding, unless broken files may be left out."""
        training, buckets = self.prepared.data.training, self.prepared.workload.buckets
        if training.num_unverified == 0:
            known = self.encoders, training, buckets, self.cache
            items, entries = list_entries(*known, **self._drawn)
            folder.require_same_run(self.output, folder.compute_run_key(self.plan, items, entries))

    @property
    def _drawn(self) -> dict[str, Any]:
        share, job = self.plan.frozen.workload.base_passes, self.plan.job
        return {"caption_dropout": job.caption_dropout, "preserve_prior": share, "flip": job.flip}

    def _load(self) -> TrainingModel:
        self.on_event(events.PhaseStarted(name="loading the transformer"))
        device, shards = self.processes.device, self.processes.num_shards
        settings, seed = self.plan.frozen.settings, self.plan.job.seed
        model, workload = self.prepared.model, self.prepared.workload
        frozen = self.plan.job.training_adapter
        trained = load_model(
            model, workload, settings, device, seed, shards=shards, training_adapter=frozen
        )
        if (started_from := self.plan.job.from_adapter) is not None:
            folder.start_from(Path(started_from), trained.transformer, trained.family)
        if self.previews:
            self.sampler.attach(trained.transformer)
        return trained

    def _list_previews(self) -> list[sample.Preview]:
        job, items = self.plan.job, self.prepared.data.training.items
        bucket, steps = self.prepared.workload.largest_bucket, job.preview_steps
        prompts = (items[0].caption,) if job.preview_prompts is None else job.preview_prompts
        starts = self.prepared.model.family.starts_from_picture
        controls = {
            item.caption: item.pixel_paths[:1] if starts else item.control_paths
            for item in reversed(items)
        }
        return [
            sample.Preview(
                text,
                bucket,
                steps,
                job.seed + at,
                controls.get(text, controls[items[0].caption]),
                title,
            )
            for at, (text, title) in enumerate(zip(prompts, job.preview_titles, strict=False))
        ]

    def _encode(self) -> tuple[EncodedDataset, EncodedDataset | None]:
        if not self.processes.is_first_of_node:
            self.processes.wait()
        if self.previews:
            self.on_event(events.PhaseStarted(name="encoding the prompts of previews"))
            self.sampler.encode_prompts(self.previews, self.cache)
        for line in self.prepared.data.training.problem_summary:
            self._notify(line)
        model = self.encoders.model
        whole = self.prepared.data.whole.items
        for line in tell_cut_captions(whole, model.family, model.config_folder):
            self._warn(line)
        self.on_event(events.PhaseStarted(name="encoding captions and images"))

        def report_progress(done: int, total: int) -> None:
            self.on_event(events.Progressed(name="encoding", done=done, total=total))

        job = self.plan.job
        encoded = encode_dataset(
            self.encoders,
            self.prepared.data.whole,
            self.prepared.workload.buckets,
            self.cache,
            **self._drawn,
            mask_floor=job.mask_floor,
            on_progress=report_progress,
        )
        for problem in encoded.problems:
            self._notify(f"left out: {problem.file}: {problem.message}")
        if self.processes.is_first_of_node:
            self.processes.wait()
        self.encoders.release()
        self.item_seconds = encoded.item_seconds
        held_out = frozenset(self.prepared.data.held_out)
        if not held_out:
            return encoded, None
        validation = encoded.select(held_out.__contains__)
        if not validation.items:
            self._warn("none of the held-out images could be read: there is no validation")
        training = encoded.select(frozenset(encoded.items).difference(held_out).__contains__)
        return training, validation if validation.items else None

    def _sample_previews(self, step: int) -> None:
        written = []
        with self._drop_failing_previews(), TORCH_LOCK:
            for number, preview in enumerate(self.previews):
                with self.monitor.phase("previews"), eager_eval(self.sampler.transformer):
                    frames = self.sampler.sample(preview)
                if self.processes.is_first:
                    path = self.output / folder.PREVIEWS / f"step-{step:06}-{number}.png"
                    self._save_frames(frames, path, preview, f"after step {step}")
                    written.append(path)
        if self.metrics and written:
            self.metrics.add_previews(step, written)
        if self.previews:
            self.on_event(events.PreviewsWritten(step=step))

    def _save_compared(self, name: str, number: int, frames: list[Image]) -> None:
        if self.processes.is_first:
            path = self.output / folder.comparison_file(name, number)
            self._save_frames(frames, path, self.previews[number], name)

    def _save_frames(
        self, frames: list[Image], path: Path, preview: sample.Preview, adapter: str
    ) -> None:
        facts = preview.facts(self.plan, adapter=adapter)
        sample.save_image(frames[0], path, facts)
        if len(frames) > 1 and has_video_decoder():
            fps = self.prepared.model.family.defaults.frames_per_second
            sample.save_clip(frames, path.with_suffix(".mp4"), facts, fps)

    @contextlib.contextmanager
    def _drop_failing_previews(self) -> Iterator[None]:
        try:
            yield
        except PREVIEW_ERRORS as error:
            is_ours = isinstance(error, errors.AutotuneError)
            if self.processes.num_shards > 1 or (not is_ours and errors.is_out_of_memory(error)):
                raise
            self._warn(f"{errors.first_line(error)}; the run goes on without previews")
            self.previews = []

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self._notify(message)

    def _notify(self, message: str) -> None:
        self.on_event(events.Notice(text=message, level="warning"))

    def _finish(self, loop: TrainingLoop, started: float) -> RunReport:
        transformer, adapter = loop.model.transformer, self.output / folder.ADAPTER_FILE
        loop.optimizer.turn_to_average()
        kept_step = loop.validation.keep_best()
        if self.processes.is_first:  # before anything that may still fail
            with self.monitor.phase("saving"):
                job, workload, digest = self.plan.job, self.plan.frozen.workload, self.plan.digest
                model, optimizer, dtype = loop.model, loop.optimizer, torch_dtype(job.save_dtype)
                save_plan(self.plan, self.output / RUN_PLAN_FILE)  # again: the folder may be new
                save_trained(adapter, model, optimizer, workload, digest, kept_step, dtype)
                self.adapter_file = folder.export_trained(adapter, job.adapter_format).name
        adapter_loss = self._known(loop.evaluate(), "with")
        transformer.disable_adapters()  # type: ignore[operator]
        base_loss = self._known(loop.evaluate(), "without")
        transformer.enable_adapters()  # type: ignore[operator]
        self.processes.wait()
        if self.previews:
            self._sample_comparison(adapter)
        verdict = None
        if self.processes.is_first:
            last_block = loop.model.family.last_block(transformer)
            losses = {"base_loss": base_loss, "adapter_loss": adapter_loss}
            verdict = folder.judge_adapter(adapter, last_block=last_block, **losses)
        report = self._report(loop, verdict, kept_step, time.monotonic() - started)
        if self.processes.is_first:
            text = report.model_dump_json(indent=1) + "\n"
            files.write_text_atomic(self.output / folder.REPORT_FILE, text)
        return report

    def _known(self, loss: float, which: str) -> float | None:
        if math.isfinite(loss):
            return loss
        self._warn(f"the loss on fresh noise is not finite {which} the adapter")
        return None

    def _sample_comparison(self, adapter: Path) -> None:
        self.on_event(events.PhaseStarted(name="sampling with and without the adapter"))
        pairs: list[tuple[Image, Image]] = []
        with self._drop_failing_previews(), self.monitor.phase("previews"):
            pairs = self.sampler.compare_adapter(adapter, self.previews, self._save_compared)
        if not self.processes.is_first or not pairs:
            return
        facts = self.previews[0].facts(self.plan, adapter="both")
        sheet = sample.make_sheet(self.previews, pairs)
        sample.save_image(sheet, self.output / "samples.png", facts)

    def _report(
        self, loop: TrainingLoop, verdict: AdapterVerdict | None, kept_step: int, seconds: float
    ) -> RunReport:
        monitor = self.monitor
        steps = Steps.of(read_metrics(loop.metrics.path) if loop.metrics else ())
        first = sum(step <= loop.first_step for step in steps.step)
        starts = first + NUM_WARMUP_STEPS, first, 0
        steady = next(start for start in starts if start in range(len(steps.step)) or not start)
        seconds_each = sorted(steps.seconds[steady:]) or [0.0]
        rare = len(seconds_each) // 20  # outliers; steps of longer captions count as they are
        step_seconds = statistics.fmean(seconds_each[rare : len(seconds_each) - rare])
        first_loss, final_loss = events.loss_change(steps.loss)
        waits = statistics.fmean(steps.data_seconds[steady:] or [0.0])
        expected, forecast = self.plan.frozen.expected, self.plan.frozen.forecast
        speed = loop.order.effective_batch_size / step_seconds if step_seconds else 0.0
        utilization = [share for share in steps.gpu_utilization[first:] if not math.isnan(share)]
        return RunReport(
            plan_digest=self.plan.digest,
            num_steps=loop.num_steps,
            resumed_at=loop.first_step,
            total_seconds=seconds,
            expected_step_seconds=expected.step_seconds,
            measured_step_seconds=step_seconds,
            data_seconds=waits,
            caching_saved_seconds=self.item_seconds
            * loop.order.effective_batch_size
            * (loop.num_steps - loop.first_step),
            limited_by=forecast.step_time.limited_by(waits) if forecast else None,
            expected_peak_memory_bytes=expected.peak_memory_bytes,
            measured_peak_memory_bytes=loop.peak_bytes or None,
            expected_run_memory_bytes=expected.run_memory_bytes,
            run_memory_bytes=expected.largest_bytes(tuple(monitor.peaks.values())),
            expected_phases=expected.phases,
            phases=tuple(monitor.peaks.values()),
            images_per_second=speed,
            gpu_utilization=statistics.fmean(utilization) if utilization else None,
            first_loss=first_loss,
            final_loss=final_loss,
            warnings=(*loop.warnings, *self.warnings),
            settings=loop.settings,
            gradient_spikes=monitor.num_spikes,
            nonfinite_gradients=monitor.num_nonfinite,
            overflowed_gradients=monitor.num_overflows,
            quantization_error=loop.model.quantization_error,
            validation=loop.validation.result(kept_step),
            adapter=self.adapter_file,
            verdict=verdict,
        )
