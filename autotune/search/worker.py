"""What a trial process does: takes real steps of a candidate with the training code.

Every request has `perform`; what it returns crosses to the parent.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autotune.errors import AutotuneError, first_line, is_out_of_memory
from autotune.knobs.modulation import find_modulation_ahead
from autotune.models.family import PRIOR, Batch, Family, Sample
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import Candidate, Outcome, TrialResult
from autotune.plan.workload import (
    Bucket,
    Workload,
    has_typical_shape,
    typical_bucket,
    typical_text_tokens,
)
from autotune.system import memory
from autotune.train import monitor, optimizer
from autotune.train.model import QualityMissed, TrainingModel, apply_settings, load_model
from autotune.train.step import (
    ConditionedImage,
    ModulationWindows,
    Noising,
    StepOutcome,
    optimizer_step,
    pick_inputs,
    predict_base,
    to_device,
)

MAX_SPREAD = 0.1  # of the middle half of steps, relative to the median; beyond, they are repeated
MAX_REPEATS = 4
MIN_PRUNING_STEPS = 2  # the first after the one measured for memory is cold: up to 1.6 times
MAX_REPEAT_SECONDS = 5.0  # no step is repeated once the timed ones have taken this long
MAX_OVERFLOWS = 17  # then a loss scale that begins at 2**16 and halves is below 1
LOSS_STEP = 3  # the steady step whose loss is reported: losses compare however many steps there are


class Failure(AutotuneError):
    """End of a request without a result; sent to the parent as training's errors are."""

    partial: TrialResult | None = None  # the last partial result that the child reported

    def __init__(
        self, outcome: Outcome, message: str, *, host_memory_bytes: int | None = None
    ) -> None:
        super().__init__(message, hint="")
        self.outcome, self.host_memory_bytes = outcome, host_memory_bytes


def classify_error(error: BaseException) -> Outcome:
    """Name the outcome that an exception stands for."""
    if isinstance(error, QualityMissed):
        return "numerics"
    if is_out_of_memory(error):
        return "oom"
    text = str(error).lower()
    is_missing = any(words in text for words in ("not supported", "not implemented"))
    if is_missing or isinstance(error, NotImplementedError | ImportError):
        return "unsupported"
    return "crash"


def first_line_with_notes(error: BaseException) -> str:
    """Shorten an error's message, with the notes on where it happened."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (first_line(error)[:200] or "no message") + notes


@dataclass
class ChildState:
    """Kept by a trial process between requests: the loaded model."""

    report: Callable[[TrialResult], None] = lambda partial: None
    """Sends a partial result to the parent, which falls back on it should the child fail."""
    cache: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialRequest:
    """Steps of a candidate on the child's model, which is loaded first. Gives a TrialResult."""

    model: ResolvedModel
    workload: Workload
    candidate: Candidate
    device: str
    num_steps: int
    prune_above_seconds: float | None = None
    """Two steady steps slower than this end the trial: other candidates are clearly faster."""

    def needs_another_step(self, seconds: list[float]) -> bool:
        limit = self.prune_above_seconds
        if limit is not None and len(seconds) >= MIN_PRUNING_STEPS and min(seconds) > limit:
            return False
        return len(seconds) < self.num_steps or self._is_unsteady(seconds)

    def _is_unsteady(self, seconds: list[float]) -> bool:
        middle = sorted(seconds)[len(seconds) // 4 : -(len(seconds) // 4) or None]
        if len(seconds) >= MAX_REPEATS * self.num_steps or sum(seconds) >= MAX_REPEAT_SECONDS:
            return False
        return max(middle) - min(middle) > MAX_SPREAD * middle[len(middle) // 2]

    def perform(self, child: ChildState) -> TrialResult:
        """Run the candidate on the child's model, which the first request loads."""
        memory.reset_host_peak()  # what earlier candidates took is not this one's
        if "loaded" not in child.cache:
            child.cache["loaded"] = load_for_trial(self)
        try:
            steps = StepRunner(child.cache["loaded"], self.workload, self.candidate)
            return steps.measure(self.needs_another_step)
        finally:
            memory.release_memory()  # else the next finds the allocator full of this one's blocks


@dataclass
class LoadedModel:
    """A model in memory, shared by candidates that differ only in settings that need no reload."""

    model: TrainingModel
    largest: list[Sample]  # one effective batch in the largest shapes: it decides memory
    typical: list[Sample]  # the same in the usual shapes, or the same list: it decides speed
    initial: list[torch.Tensor]  # values of the adapter that every candidate begins with
    windows: ModulationWindows | None
    """Of modulations that are computed ahead; None if their layers are resident."""
    seconds: float
    peak_bytes: int | None
    """Peak of device memory while loading; None on CPU, where the process's memory tells."""


def load_for_trial(request: TrialRequest) -> LoadedModel:
    """Load the transformer under the candidate's settings, with an adapter and samples."""
    device, workload = torch.device(request.device), request.workload
    started = time.perf_counter()
    resolved = request.model
    model = load_model(resolved, workload, request.candidate, device, seed=0)
    known, size = (resolved.family, resolved.config, workload), workload.effective_batch_size
    longest = longest_captions(resolved.family, workload, size)
    if not resolved.family.masks_padding:  # equal ones are computed together, which takes the most
        longest = [workload.max_text_tokens] * size
    largest = synthetic_samples(*known, workload.largest_bucket, longest, model.dtype)
    typical = largest
    if has_typical_shape(workload):
        bucket, usual = typical_bucket(workload), typical_text_tokens(workload)
        samples = synthetic_samples(*known, bucket, usual, model.dtype)
        pairs = zip(samples, largest, strict=True)  # modulations of a window are those of both
        typical = [{**sample, **pick_inputs(model, like)} for sample, like in pairs]
    windows = None
    if ahead := find_modulation_ahead(model.transformer):
        images = [
            ConditionedImage(tuple(sample["latents"].shape), pick_inputs(model, sample))
            for sample in largest
        ]
        place = partial(to_device, device=device, dtype=model.dtype)
        noising = Noising(process=model.noise)
        windows = ModulationWindows(model, ahead, noising, lambda _: images, size, 0, place)
    # On the host: a run has no second copy on the device.
    initial = [parameter.detach().to("cpu", copy=True) for parameter in model.adapter]
    seconds, peak_bytes = time.perf_counter() - started, memory.device_peak_bytes(device)
    return LoadedModel(model, largest, typical, initial, windows, seconds, peak_bytes)


def longest_captions(family: Family, workload: Workload, count: int) -> list[int]:
    """Give lengths in tokens; with masked padding every second is shorter, for the mask."""
    longest = workload.max_text_tokens
    less = family.text_multiple if workload.text_padding == "masked" else 0
    return [max(1, longest - less * (number % 2)) for number in range(count)]


def synthetic_samples(
    family: Family,
    config: Mapping[str, Any],
    workload: Workload,
    bucket: Bucket,
    text_tokens: Sequence[int],
    dtype: torch.dtype,
) -> list[Sample]:
    """Draw random samples in the shape of `bucket`, one for each caption length."""
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
        self.retries_before = monitor.allocator_retries(model.device)
        apply_settings(model, candidate)
        for parameter, value in zip(model.adapter, loaded.initial, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        rates = {"learning_rate": 1e-4, "weight_decay": 0.0, "max_grad_norm": 1.0}
        self.optimizer = optimizer.AdapterOptimizer(
            model.adapter, **rates, choice=workload.optimizer, ema_decay=workload.ema_decay
        )
        self.batches = self._batches(loaded.largest)
        self.step_number = 0
        self.noising = Noising(process=model.noise)

    def measure(self, needs_another_step: Callable[[list[float]], bool]) -> TrialResult:
        """Take steps while `needs_another_step` of the steady ones' seconds. Memory of compiled
        settings is that of the graph for the first shape, here the largest."""
        # The first step allocates the optimizer's state, unless its gradient overflows.
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
            allocator_retries=monitor.allocator_retries(self.model.device) - self.retries_before,
            host_memory_bytes=memory.host_peak_bytes(),
            quantization_error=self.model.quantization_error,
            final_loss=final_loss if math.isfinite(final_loss) else None,
            message=defect or "",
        )

    def _batches(self, samples: Sequence[Sample]) -> list[Batch]:
        size = self.candidate.micro_batch_size
        starts = range(0, len(samples), size)
        batches = [self.model.collate(samples[start : start + size]) for start in starts]
        if self.candidate.batch_memory == "pinned":
            for batch in batches:
                batch.update({name: tensor.pin_memory() for name, tensor in batch.items()})
        return batches

    def step(self) -> StepOutcome:
        """Take one optimizer step; micro-batches are copied to the device one by one."""
        self.step_number += 1
        return optimizer_step(
            self.model.family,
            self.model.transformer,
            self.optimizer,
            map(self._to_device, self.batches),
            noising=self.noising,
            step=self.step_number,
            effective_batch_size=self.workload.effective_batch_size,
        )

    def _to_device(self, batch: Batch) -> Batch:
        return to_device(batch, self.model.device, self.model.dtype)

    def _prepare_modulation(self) -> float:
        windows = self.loaded.windows
        if windows is None:
            return 0.0
        windows.prepare(self.step_number + 1)
        return windows.share_seconds

    def _pass_through_base(self) -> float:
        """Predict as images do that preserve the prior; returns a step's share of its seconds."""
        share = self.workload.base_passes
        if not share:
            return 0.0
        model, started, position = self.model, time.perf_counter(), 0
        for batch in map(self._to_device, self.batches):
            noisy, step = batch["latents"], self.step_number + 1  # levels that are held for it
            levels = [
                self.noising.level_at(step, position + at, noisy.shape[1:])
                for at in range(len(noisy))
            ]
            known = torch.tensor(levels, device=model.device), batch
            base = predict_base(model.family, model.transformer, noisy, *known)
            base.sum().item()  # the device has finished by then
            position += len(noisy)
        return share * (time.perf_counter() - started)

    def timed_step(self) -> tuple[StepOutcome, float]:
        """Take a step; its loss is read back, so the device has finished by then."""
        share = self._prepare_modulation() + self._pass_through_base()
        started = time.perf_counter()
        outcome = self.step()
        return outcome, time.perf_counter() - started + share

    def memory_step(self) -> tuple[int, float]:
        """Take a step, in which all images preserve the prior if any may; returns its peak of
        memory in bytes, and its seconds."""
        self._prepare_modulation()
        plain = self.batches
        if self.workload.base_passes:
            self.batches = [{**batch, PRIOR: torch.ones(())} for batch in plain]
        started = time.perf_counter()
        _, peak = memory.measure_peak_memory(self.model.device, self._live_tensors, self.step)
        self.batches = plain
        return peak, time.perf_counter() - started

    def _live_tensors(self) -> list[torch.Tensor]:
        batches = (tensor for batch in self.batches for tensor in batch.values())
        return [*self.optimizer.live_tensors(self.model.transformer), *batches]

    def find_defect(self, outcome: StepOutcome) -> str | None:
        """Tell why the steps cannot be training: a non-finite loss, or layers without gradients."""
        if not math.isfinite(outcome.loss):
            return "the loss is not finite"
        # Some layers of the last block may stay still: what has no backward pass shows in all.
        last = set(map(id, self.model.family.blocks(self.model.transformer)[-1].parameters()))
        pairs = zip(self.optimizer.parameters, self.optimizer.masters, strict=True)
        state = self.optimizer.inner.state
        unmoved = 0
        if any(state.values()):  # plain SGD has none at all
            tried = (master for parameter, master in pairs if id(parameter) not in last)
            unmoved = sum(not state.get(master) for master in tried)
        if outcome.gradient_norm == 0 or unmoved:
            return f"no gradient reached {unmoved or 'any'} adapter tensors"
        return None
