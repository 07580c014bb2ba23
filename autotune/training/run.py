"""`autotune train`: runs exactly what a plan says, and reports what happened against what was promised."""

import dataclasses
import time
from pathlib import Path

import torch

from autotune.atomic import write_whole
from autotune.job import MAX_PREVIEW_PROMPTS
from autotune.knobs.allocator import configure_allocator
from autotune.knobs.precision import torch_dtype
from autotune.schema import HardwareProfile, RunReport, TrainingPlan
from autotune.training.checkpoint import Checkpoints
from autotune.training.data.cache import Cache
from autotune.training.data.encode import encode_dataset
from autotune.training.data.encoded import EncodedDataset
from autotune.training.encoders import Encoders
from autotune.training.events import Events
from autotune.training.folder import CHECKPOINTS, REPORT_FILE, run_key, telling_of_full_disk
from autotune.training.loop import Loop, Surroundings
from autotune.training.memory import telling_of_short_memory
from autotune.training.metrics import Metrics
from autotune.training.model import as_written, load_model
from autotune.training.monitor import PhaseWatch
from autotune.training.prepare import Prepared, prepare
from autotune.training.preview import Shot, Studio, grid, save_image
from autotune.training.processes import Processes, join
from autotune.training.save import ADAPTER_FILE, save_trained
from autotune.training.verdict import judge

TRACE_FILE = "trace.json"


def train(
    plan: TrainingPlan,
    hardware: HardwareProfile,
    cache_folder: Path,
    events: Events | None = None,
    *,
    resume: bool = False,
    trace: bool = False,
) -> RunReport:
    """Train what the plan says on this machine; with `resume`, go on from the newest checkpoint where there is one.

    Writes the adapter, a report, curves and, where the job has prompts, samples with and without the adapter.

    Raises:
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: the model or the data cannot be used, or the output folder belongs to another run.
        Preempted: a signal came; a checkpoint is written.
        AutotuneError: the loss is no longer finite, disk or memory ran out, or the wrong number of processes
            runs.
    """
    started = time.monotonic()
    prepared = prepare(plan, hardware, resume=resume)
    configure_allocator(plan.frozen.settings.allocator)  # before anything starts CUDA here
    try:
        with telling_of_full_disk(prepared.output), telling_of_short_memory():
            return _train(plan, prepared, hardware, cache_folder, events, resume=resume, trace=trace, started=started)
    finally:
        prepared.claim.release()


def _train(
    plan: TrainingPlan,
    prepared: Prepared,
    hardware: HardwareProfile,
    cache_folder: Path,
    events: Events | None,
    *,
    resume: bool,
    trace: bool,
    started: float,
) -> RunReport:
    processes = join(plan.frozen.hardware, torch.device(hardware.device.torch_name))
    events = (events or Events()) if processes.is_first else Events()
    run = _Run(plan, prepared, processes, events, PhaseWatch(processes.device))
    with run.watch.phase("caching"):
        encoders = run.encoders()
        studio = run.studio(cache_folder, encoders)
        encoded = run.encode(cache_folder, encoders)
        encoders.release()
    with run.watch.phase("loading"):
        events.on_phase("loading the transformer")
        trained = load_model(
            prepared.model,
            prepared.workload,
            plan.frozen.settings,
            processes.device,
            plan.job.seed,
            shards=processes.world_size if processes.strategy == "fsdp2" else 1,
        )
        if run.shots and processes.samples:
            studio.attach(trained.transformer)
    key = run_key(plan, encoded)
    job, output = plan.job, prepared.output
    keep_every = job.checkpoints_keep_every * job.checkpointing_steps
    with Checkpoints(
        output / CHECKPOINTS, key, keep_last=job.checkpoints_total_limit, keep_every=keep_every
    ) as checkpoints:
        checkpoint = checkpoints.newest(events.on_warning) if resume else None
        loop = Loop(plan, trained, encoded, checkpoint)
        events.on_phase(f"training from step {loop.first_step}" if checkpoint else "training")
        metrics = run.metrics(loop.first_step)
        around = Surroundings(
            processes=processes,
            checkpoints=checkpoints,
            metrics=metrics,
            events=events,
            preview=lambda step: run.preview(studio, step),
            budget_bytes=hardware.device.budget_bytes,
            trace=output / TRACE_FILE if trace and processes.is_first else None,
        )
        try:
            with run.watch.phase("training"):
                loop.run(around)
        finally:
            if metrics:
                metrics.close()
    with as_written(loop.model.transformer):
        report = run.finish(loop, studio, metrics, started)
    processes.wait()
    return report


@dataclasses.dataclass
class _Run:
    """The phases of one run around its loop."""

    plan: TrainingPlan
    prepared: Prepared
    processes: Processes
    events: Events
    watch: PhaseWatch

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.plan.frozen.settings.precision)

    def encoders(self) -> Encoders:
        """As the plan's caching settings say."""
        frozen = self.plan.frozen
        return Encoders(self.prepared.model, frozen.caching, self.dtype, self.processes.device, frozen.settings.loader)

    def encode(self, cache_folder: Path, encoders: Encoders) -> EncodedDataset:
        """Encode on the first process while the others wait; then they find all of it in the cache."""
        if not self.processes.is_first:
            self.processes.wait()
        model = self.prepared.model
        for line in self.prepared.dataset.left_out:
            self.events.on_warning(line)
        self.events.on_phase("encoding captions and images")
        encoded = encode_dataset(
            model.family,
            encoders.pipeline,
            self.prepared.dataset,
            self.prepared.workload.buckets,
            Cache(cache_folder),
            identity=encoders.identity,
            caption_dropout=self.plan.job.caption_dropout,
            release=encoders.caching.residency == "release",
            on_progress=self.events.on_encoded,
        )
        for problem in encoded.problems:
            self.events.on_warning(f"left out: {problem.file}: {problem.message}")
        if self.processes.is_first:
            self.processes.wait()
        return encoded

    @property
    def shots(self) -> list[Shot]:
        """What previews show; the controls are those of the image whose caption is the prompt, or of the first."""
        job, items = self.plan.job, self.prepared.dataset.items
        by_caption = {item.caption: item for item in reversed(items)}
        return [
            Shot(
                prompt,
                self.prepared.workload.largest_bucket,
                job.preview_steps,
                job.seed + number,
                by_caption.get(prompt, items[0]).control_paths,
            )
            for number, prompt in enumerate(job.preview_prompts[:MAX_PREVIEW_PROMPTS])
        ]

    def studio(self, cache_folder: Path, encoders: Encoders) -> Studio:
        """Ready to sample the job's prompts."""
        studio = Studio(encoders)
        if self.shots and self.processes.samples:
            self.events.on_phase("encoding the prompts of previews")
            studio.learn(self.shots, Cache(cache_folder))
        return studio

    def metrics(self, first_step: int) -> Metrics | None:
        """On the first process."""
        if not self.processes.is_first:
            return None
        return Metrics(self.prepared.output, resumed_at=first_step, report_to=self.plan.job.report_to)

    def preview(self, studio: Studio, step: int) -> None:
        """Sample the job's prompts with what is trained so far."""
        for number, shot in enumerate(self.shots):
            with self.watch.phase("previews"), as_written(studio.pipeline.transformer):
                frames = studio.sample(shot)
            if self.processes.is_first:
                save_image(frames[0], self.prepared.output / "previews" / f"step-{step:06}-{number}.png")

    def finish(self, loop: Loop, studio: Studio, metrics: Metrics | None, started: float) -> RunReport:
        """Save the adapter, look at it, and report."""
        output, transformer = self.prepared.output, loop.model.transformer
        adapter_loss = loop.evaluate()
        transformer.disable_adapters()  # type: ignore[operator]
        base_loss = loop.evaluate()
        transformer.enable_adapters()  # type: ignore[operator]
        adapter = output / ADAPTER_FILE
        if self.processes.is_first:
            with self.watch.phase("saving"):
                save_trained(adapter, loop.model, loop.optimizer, self.plan, loop.num_steps)
        self.processes.wait()
        if self.processes.samples:
            self._sample(studio, adapter)
        verdict = judge(adapter, base_loss=base_loss, adapter_loss=adapter_loss) if self.processes.is_first else None
        report = self._report(loop, metrics, time.monotonic() - started).model_copy(update={"verdict": verdict})
        if self.processes.is_first:
            write_whole(output / REPORT_FILE, report.model_dump_json(indent=1) + "\n")
        return report

    def _sample(self, studio: Studio, adapter: Path) -> None:
        if not self.shots:
            return
        self.events.on_phase("sampling with and without the adapter")
        with self.watch.phase("previews"):
            pairs = studio.with_and_without(adapter, self.shots)
        if not self.processes.is_first:
            return
        for name, image in zip(("without", "with"), pairs[0], strict=True):
            save_image(image, adapter.parent / f"sample_{name}_adapter.png")
        save_image(grid(pairs), adapter.parent / "samples.png")

    def _report(self, loop: Loop, metrics: Metrics | None, total_seconds: float) -> RunReport:
        """What the run did, against what the plan promised."""
        losses, recorded = (metrics.losses, metrics.seconds) if metrics else ([], [])
        steady = sorted(loop.seconds[2:] or loop.seconds or recorded) or [0.0]
        step_seconds = steady[len(steady) // 2]
        head = losses[: max(1, len(losses) // 10)]
        tail = losses[-len(head) :]
        waits = loop.data_seconds[2:] or loop.data_seconds or [0.0]
        expected, busy = self.plan.frozen.expected, loop.utilisation.readings
        return RunReport(
            plan_digest=self.plan.digest,
            num_steps=loop.num_steps,
            resumed_at=loop.first_step,
            total_seconds=total_seconds,
            expected_step_seconds=expected.step_seconds,
            measured_step_seconds=step_seconds,
            data_seconds=sum(waits) / len(waits),
            expected_peak_memory_bytes=expected.peak_memory_bytes,
            measured_peak_memory_bytes=loop.peak_bytes or None,
            expected_phases=expected.phases,
            phases=tuple(self.watch.peaks.values()),
            images_per_second=loop.order.effective_batch_size / step_seconds if step_seconds else 0.0,
            gpu_utilisation=sum(busy) / len(busy) if busy else None,
            first_loss=sum(head) / max(1, len(head)),
            final_loss=sum(tail) / max(1, len(tail)),
            warnings=tuple(loop.warnings),
            settings=loop.settings,
            quantization_error=loop.model.quantization_error,
            adapter=ADAPTER_FILE,
        )
