"""`autotune train`: runs exactly what a plan says, and reports what happened against what was promised."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from autotune.atomic import write_whole
from autotune.errors import AutotuneError, DoesNotFit, InvalidInput
from autotune.families.base import Batch
from autotune.families.resolve import ResolvedModel, resolve_model
from autotune.fit import data_misfits, hardware_misfits, model_misfits
from autotune.knobs.base import Setting
from autotune.knobs.precision import torch_dtype
from autotune.schema import HardwareProfile, RunReport, TrainingPlan, Workload
from autotune.training.data.batches import Order
from autotune.training.data.cache import Cache
from autotune.training.data.dataset import Dataset, read_dataset
from autotune.training.data.encode import encode_dataset
from autotune.training.data.encoded import EncodedDataset
from autotune.training.data.identity import read_identity
from autotune.training.describe import describe_workload
from autotune.training.events import Events, StepEvent
from autotune.training.memory import allocated_bytes, live_tensors, peak_memory_bytes
from autotune.training.model import TrainingModel, load_model
from autotune.training.preview import load_pipeline, sample_preview
from autotune.training.save import ADAPTER_FILE, save_trained
from autotune.training.step import AdapterOptimizer, StepOutcome, optimizer_step

REPORT_FILE = "report.json"


def train(plan: TrainingPlan, hardware: HardwareProfile, cache_folder: Path, events: Events | None = None) -> RunReport:
    """Train what the plan says on this machine.

    Writes the adapter, a report and, where the job has a prompt, one sample with and one without the adapter.

    Raises:
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: the model or the data cannot be used, or the output folder belongs to another run.
        AutotuneError: the loss is no longer finite.
    """
    events = events or Events()
    started = time.monotonic()
    model, dataset, workload = _require_fit(plan, hardware)
    output = _new_output_folder(Path(plan.job.output))
    device = torch.device(_device_name(hardware))
    events.on_phase("encoding captions and images")
    encoded = _encode(plan, model, dataset, workload, device, cache_folder, events)
    events.on_phase("loading the transformer")
    trained = load_model(model, workload, plan.frozen.settings, device, plan.job.seed)
    events.on_phase("training")
    loop = _Loop(plan, trained, encoded)
    for event in loop.run():
        events.on_step(event)
    adapter = output / ADAPTER_FILE
    save_trained(adapter, trained, loop.optimizer, plan, plan.job.num_steps)
    _sample(plan, model, adapter, workload, device, events)
    report = loop.report(time.monotonic() - started)
    write_whole(output / REPORT_FILE, report.model_dump_json(indent=1) + "\n")
    return report


def _require_fit(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[ResolvedModel, Dataset, Workload]:
    require_fit(hardware_misfits(plan, hardware))
    if plan.job.data is None:
        raise InvalidInput("the plan names no data folder", hint="name one: autotune train plan.yaml --data FOLDER")
    model = resolve_model(plan.job.model)
    require_fit(model_misfits(plan, model.spec))
    dataset = read_dataset(Path(plan.job.data))
    planned = plan.frozen.workload
    workload = describe_workload(
        model,
        dataset,
        resolution_px=planned.resolution_px,
        rank=planned.rank,
        lora_alpha=planned.lora_alpha,
        targets=planned.targets,
        effective_batch_size=planned.effective_batch_size,
        quality=planned.quality,
        objective=planned.objective,
    )
    require_fit(data_misfits(plan, Setting(hardware, model.family, workload)))
    return model, dataset, workload


def require_fit(misfits: tuple[str, ...]) -> None:
    """Raise DoesNotFit when there is any misfit, naming the first and counting the rest."""
    if misfits:
        more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        raise DoesNotFit(
            f"the plan does not fit: {misfits[0]}{more}",
            hint="see all with `autotune check PLAN`; make one for this machine and data with `autotune plan`",
        )


def _new_output_folder(folder: Path) -> Path:
    if (folder / ADAPTER_FILE).exists():
        raise InvalidInput(f"{folder} holds the adapter of another run", hint="choose another folder with --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"cannot make the output folder {folder}: {error.strerror}", hint="choose another"
        ) from error
    return folder


def _device_name(hardware: HardwareProfile) -> str:
    kind = hardware.device.kind
    return f"cuda:{hardware.device.index}" if kind == "cuda" else kind


def _encode(
    plan: TrainingPlan,
    model: ResolvedModel,
    dataset: Dataset,
    workload: Workload,
    device: torch.device,
    cache_folder: Path,
    events: Events,
) -> EncodedDataset:
    assert model.folder is not None  # the data was described from it
    precision = plan.frozen.settings.precision
    return encode_dataset(
        model.family,
        lambda: load_pipeline(model, torch_dtype(precision), device, transformer=None),
        dataset,
        workload.buckets,
        Cache(cache_folder),
        identity=read_identity(model.folder, model.family, settings=precision),
        on_progress=events.on_encoded,
    )


def _sample(
    plan: TrainingPlan, model: ResolvedModel, adapter: Path, workload: Workload, device: torch.device, events: Events
) -> None:
    if not plan.job.preview_prompts:
        return
    events.on_phase("sampling with and without the adapter")
    preview = sample_preview(
        model,
        adapter,
        plan.job.preview_prompts[0],
        workload.largest_bucket,
        num_steps=plan.job.preview_steps,
        seed=plan.job.seed,
        dtype=torch_dtype(plan.frozen.settings.precision),
        device=device,
    )
    for name, frames in (("with", preview.with_adapter), ("without", preview.without_adapter)):
        frames[0].save(adapter.parent / f"sample_{name}_adapter.png")


class _Loop:
    """The steps of one run: the same order and noise whatever the micro-batch size."""

    def __init__(self, plan: TrainingPlan, model: TrainingModel, encoded: EncodedDataset) -> None:
        self.plan, self.model, self.encoded = plan, model, encoded
        job = plan.job
        self.optimizer = AdapterOptimizer(
            model.adapter,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            max_grad_norm=job.max_grad_norm,
        )
        self.order = Order(
            groups=encoded.groups,
            repeats=tuple(item.repeats for item in encoded.items),
            effective_batch_size=plan.frozen.workload.effective_batch_size,
            seed=job.seed,
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def run(self) -> Iterator[StepEvent]:
        """Take every step; on CPU the second also measures memory, and like the first is left out of the speed."""
        num_steps = self.plan.job.num_steps
        for step in range(num_steps):
            started = time.perf_counter()
            outcome = self._measured_step(step) if step == 1 else self._step(step)
            seconds = time.perf_counter() - started
            if not math.isfinite(outcome.loss):
                raise AutotuneError(
                    f"the loss is {outcome.loss} at step {step + 1}",
                    hint="lower the rate: autotune train PLAN --learning-rate X",
                )
            self.losses.append(outcome.loss)
            self.seconds.append(seconds)
            yield StepEvent(step + 1, num_steps, outcome.loss, seconds, allocated_bytes(self.model.device))

    def _step(self, step: int) -> StepOutcome:
        return optimizer_step(
            self.model.family,
            self.model.transformer,
            self.optimizer,
            self._batches(step),
            effective_batch_size=self.order.effective_batch_size,
            timestep_shift=self.plan.job.timestep_shift,
            seed=self.plan.job.seed,
            step=step,
        )

    def _measured_step(self, step: int) -> StepOutcome:
        outcomes: list[StepOutcome] = []
        live = live_tensors(self.model.transformer, self.optimizer)
        self.peak_bytes = peak_memory_bytes(self.model.device, live, lambda: outcomes.append(self._step(step)))
        return outcomes[0]

    def _batches(self, step: int) -> Iterator[Batch]:
        for micro in self.order.micro_batches(step, self.plan.frozen.settings.micro_batch_size):
            samples = [
                self.encoded.sample(index, dropped=dropped)
                for index, dropped in zip(micro.indices, micro.dropped, strict=True)
            ]
            batch = self.model.family.collate(samples)
            yield {
                name: tensor.to(self.model.device, self.model.dtype if tensor.is_floating_point() else None)
                for name, tensor in batch.items()
            }

    def report(self, total_seconds: float) -> RunReport:
        """What the run did, against what the plan promised."""
        steady = sorted(self.seconds[2:] or self.seconds)
        step_seconds = steady[len(steady) // 2]
        expected = self.plan.frozen.expected
        head = self.losses[: max(1, len(self.losses) // 10)]
        tail = self.losses[-len(head) :]
        return RunReport(
            plan_digest=self.plan.digest,
            num_steps=len(self.losses),
            total_seconds=total_seconds,
            expected_step_seconds=expected.step_seconds,
            measured_step_seconds=step_seconds,
            expected_peak_memory_bytes=expected.peak_memory_bytes,
            measured_peak_memory_bytes=self.peak_bytes or None,
            images_per_second=self.order.effective_batch_size / step_seconds,
            first_loss=sum(head) / len(head),
            final_loss=sum(tail) / len(tail),
            settings=self.plan.frozen.settings,
            adapter=ADAPTER_FILE,
        )
