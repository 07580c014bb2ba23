"""One optimizer step, shared by training and trials."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor, nn

from autotune.data import batches, encode
from autotune.knobs.modulation import ModulationAhead, find_modulation_ahead, window_steps
from autotune.models.adapter import negated_adapter, without_adapter
from autotune.models.family import (
    DOWN,
    PLACES,
    PRIOR,
    Batch,
    Family,
    Sample,
    denoising_loss,
    unwrap_model,
)
from autotune.models.latents import send
from autotune.models.noise import FLOW_MATCHING, NoiseProcess
from autotune.plan import job, workload
from autotune.train.model import TrainingModel
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.processes import Processes

SLIDER_GUIDANCE = 3.0  # ai-toolkit's; the authors' scripts take 4 for Stable Diffusion
TINY = 1e-9  # keeps quantiles off 0 and 1, where a normal distribution has none


@dataclass(frozen=True)
class Noising:
    """The noise of each image and the weight of its loss (Esser et al. 2024, 3.1 and 5.3.2)."""

    seed: int = 0
    # Shift s towards noise, s * t / (1 + (s - 1) * t), or a function from latents' shapes to it.
    shift: float | Callable[[Sequence[int]], float] = 1.0
    sampling: job.TimestepSampling = "logit_normal"
    weighting: job.Weighting = "none"
    process: NoiseProcess = FLOW_MATCHING
    # Where processes hold the weights together, all pass through the base if one of them does.
    always_predicts_base: bool = False
    slider_ends: tuple[Sample, ...] = ()  # the positive and the negative one

    def draw(self, step: int, position: int, shape: Sequence[int]) -> tuple[Tensor, float]:
        """Draw noise of `shape` and a level, by seed, step and position alone."""
        generator = torch.Generator().manual_seed(_seed_at(self.seed, step, position))
        level = self._level(generator, shape)
        return torch.randn(*shape, generator=generator), level

    def level_at(self, step: int, position: int, shape: Sequence[int]) -> float:
        generator = torch.Generator().manual_seed(_seed_at(self.seed, step, position))
        return self._level(generator, shape)

    def _level(self, generator: torch.Generator, shape: Sequence[int]) -> float:
        if (self.process.lowest_share, self.process.highest_share) != (0.0, 1.0):
            return self.level_of_quantile(float(torch.rand((), generator=generator)), shape)
        if self.sampling == "uniform":
            return self._shifted(float(torch.rand((), generator=generator)), shape)
        normal = float(torch.randn((), generator=generator))
        return self._shifted(1 / (1 + math.exp(-normal)), shape)

    def level_of_quantile(self, quantile: float, shape: Sequence[int]) -> float:
        """Return the level that this share of all draws, in (0, 1), is below."""
        lowest = self._share_below(self.process.lowest_share, shape)
        highest = self._share_below(self.process.highest_share, shape)
        whole = min(max(lowest + quantile * (highest - lowest), TINY), 1 - TINY)
        if self.sampling != "uniform":
            whole = 1 / (1 + math.exp(-NormalDist().inv_cdf(whole)))
        return self._shifted(whole, shape)

    def _share_below(self, level: float, shape: Sequence[int]) -> float:
        if level in (0.0, 1.0):
            return level
        shift = self.shift(shape) if callable(self.shift) else self.shift
        plain = level / (shift - (shift - 1) * level)
        if self.sampling == "uniform":
            return plain
        return NormalDist().cdf(math.log(plain / (1 - plain)))

    def _shifted(self, level: float, shape: Sequence[int]) -> float:
        shift = self.shift(shape) if callable(self.shift) else self.shift
        return self.process.level(shift * level / (1 + (shift - 1) * level))

    def loss(
        self, family: Family, transformer: nn.Module, batch: Batch, step: int, position: int
    ) -> Tensor:
        """Return the mean loss of a micro-batch whose first image is at `position` of its step."""
        clean = batch["latents"]
        draws = [self.draw(step, position + i, clean.shape[1:]) for i in range(len(clean))]
        noise = send(torch.stack([noise for noise, _ in draws]).to(clean.dtype), clean.device)
        levels = send(torch.tensor([level for _, level in draws]), clean.device)
        kind = self.process, self.weighting
        if PRIOR in batch or self.always_predicts_base:
            known = family, transformer, self.process.add_noise(clean, noise, levels), levels
            base, strength = predict_base(*known, batch), -1 if DOWN in batch else 1
            # From one end toward the other: Gandikota et al. 2023, eq. 7.
            for end, sign in zip(self.slider_ends, (strength, -strength), strict=False):
                other = to_device(family.collate([end] * len(clean)), clean.device, clean.dtype)
                base += sign * SLIDER_GUIDANCE * predict_base(*known, {**batch, **other})
            batch = {**batch, PRIOR: base} if PRIOR in batch else batch
            del known, base
        with polarity(transformer, batch):
            return denoising_loss(family, transformer, batch, noise, levels, *kind)


def polarity(transformer: nn.Module, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Compute at the strength that the batch is for."""
    bare = unwrap_model(transformer)
    return negated_adapter(bare) if DOWN in batch else contextlib.nullcontext()


@torch.no_grad()
def predict_base(
    family: Family, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
) -> Tensor:
    """Predict as the model does without the adapter that is trained."""
    bare = unwrap_model(transformer)
    with without_adapter(bare):
        return family.predict(bare, noisy, levels, batch)


def _seed_at(seed: int, step: int, position: int) -> int:
    # Large seeds would overflow torch's 64 bits.
    return ((seed * 1_000_003 + step) * 1_000_003 + position) % 2**63


def _seed_dropout(device: torch.device, seed: int) -> None:
    """Seed one device's masks; `torch.manual_seed` would take 90 us, for all devices."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Send a batch to `device`, its floating-point tensors in `dtype`; asynchronous if pinned. What
    the host reads stays there."""
    sent = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
        for name, tensor in batch.items()
        if name != PLACES
    }
    return {**batch, **sent}


@dataclass(frozen=True)
class StepOutcome:
    """Loss, norm of the gradient, and in fp16 the factor of the next step's losses."""

    loss: float
    gradient_norm: float
    loss_scale: float | None = None

    @property
    def overflowed(self) -> bool:
        """Tell if only the scaled gradient overflowed fp16: the scale fell, no weight moved."""
        is_only_gradient = math.isfinite(self.loss) and not math.isfinite(self.gradient_norm)
        return self.loss_scale is not None and is_only_gradient


def optimizer_step(
    family: Family,
    transformer: nn.Module,
    optimizer: AdapterOptimizer,
    micro_batches: Iterable[Batch],
    *,
    noising: Noising = Noising(),
    step: int,
    effective_batch_size: int,
    first_position: int = 0,
    average: Callable[[Tensor], None] | None = None,
) -> StepOutcome:
    """Accumulate the gradients of one effective batch, then update the adapter once.

    Each micro-batch weighs by its size. With several processes `effective_batch_size` counts this
    one's images, `first_position` those of processes before it, and `average` makes the loss its
    mean over all. DDP averages gradients in the last micro-batch's backward pass.
    """
    # Made there: sent from the host, it would wait for the device.
    total = torch.zeros((), device=optimizer.masters[0].device)
    position, end = first_position, first_position + effective_batch_size
    unsynchronized = getattr(transformer, "no_sync", contextlib.nullcontext)
    for batch in micro_batches:
        size = len(batch["latents"])
        with contextlib.nullcontext() if position + size == end else unsynchronized():
            _seed_dropout(batch["latents"].device, _seed_at(-1 - noising.seed, step, position))
            loss = noising.loss(family, transformer, batch, step, position)
            loss = loss * (size / effective_batch_size)
            with polarity(transformer, batch):  # checkpointed blocks run again
                optimizer.scale(loss).backward()  # type: ignore[no-untyped-call]
        position += size
        total = total + loss.detach()
        del loss  # else what layers save on graph nodes would stay through the next micro-batch
    norm = optimizer.step()
    if average:
        average(total)
    scale = optimizer.loss_scale
    numbers = [total, norm.to(total), *([] if scale is None else [scale.to(total)])]
    outcome = StepOutcome(*torch.stack(numbers).tolist())  # one synchronization, not one for each
    if math.isfinite(outcome.gradient_norm):
        optimizer.average()
    return outcome


@dataclass(frozen=True)
class ConditionedImage:
    """Facts of an image that decide its modulation, besides its noise level."""

    latents_shape: Sequence[int]
    inputs: Batch


@dataclass
class ModulationWindows:
    """The modulations of coming steps, computed together before they are needed."""

    model: TrainingModel
    ahead: ModulationAhead
    noising: Noising
    images: Callable[[int], Sequence[ConditionedImage]]
    images_per_step: int
    first_position: int
    place: Callable[[Batch], Batch]
    end_inputs: Sequence[Batch] = ()  # of a slider
    share_seconds: float = 0.0  # a step's share of the time that the newest window took
    _held: int = -1

    @cached_property
    def num_steps(self) -> int:
        return window_steps(self.ahead.row_bytes, self.images_per_step)

    def prepare(self, step: int) -> None:
        """Compute the window that the step lies in, unless it is held."""
        window = step // self.num_steps
        if window == self._held:
            return
        started = time.perf_counter()
        inputs, levels = [], []
        for number in range(window * self.num_steps, (window + 1) * self.num_steps):
            for position, image in enumerate(self.images(number), self.first_position):
                level = self.noising.level_at(number, position, image.latents_shape)
                inputs += [image.inputs, *self.end_inputs]
                levels += [level] * (1 + len(self.end_inputs))
        self._held = -1  # an error may leave half a window
        collected = collect_conditionings(self.model, self.ahead, inputs, levels, self.place)
        self.ahead.hold(collected, self.num_steps * self.images_per_step)
        self._held, self.share_seconds = window, (time.perf_counter() - started) / self.num_steps


def make_windows(
    model: TrainingModel,
    encoded: encode.EncodedDataset,
    order: batches.BatchOrder,
    noising: Noising,
    processes: Processes,
    place: Callable[[Batch], Batch],
) -> ModulationWindows | None:
    """Make the windows of this process's steps; None if the modulation layers are resident."""
    ahead = find_modulation_ahead(model.transformer)
    if ahead is None:
        return None
    known: dict[batches.Draw, ConditionedImage] = {}
    rank, world_size = processes.rank, processes.world_size
    share = order.effective_batch_size // world_size
    ends = [pick_inputs(model, end) for end in noising.slider_ends]

    def condition(draw: batches.Draw) -> ConditionedImage:
        if draw not in known:  # so that each is read once in a run, and its prompt not kept
            sample = encoded.sample(*draw)
            shape = tuple(sample["latents"].shape)
            known[draw] = ConditionedImage(shape, pick_inputs(model, sample))
        return known[draw]

    def images(step: int) -> list[ConditionedImage]:
        planned = order.micro_batches(step, share, rank=rank, world_size=world_size)
        return [condition(draw) for part in planned for draw in part.draws]

    known_ahead = model, ahead, noising, images, share * (1 + len(ends))
    return ModulationWindows(*known_ahead, rank * share, place, ends)


def collect_conditionings(
    model: TrainingModel,
    ahead: ModulationAhead,
    inputs: Sequence[Batch],
    levels: Sequence[float],
    place: Callable[[Batch], Batch],
) -> dict[bytes, Tensor]:
    """Call the transformer without blocks, on the smallest images, to get what blocks depend on."""
    family, transformer, device = model.family, model.transformer, model.device
    side = family.size_multiple_px
    smallest = workload.Bucket(width_px=side, height_px=side, num_frames=1, num_items=1)
    shapes = family.sample_shapes(unwrap_model(transformer).config, smallest, 1, 0)
    blank = {name: torch.zeros(shape) for name, shape in shapes.items()}
    batch = place(family.collate([{**blank, **each} for each in inputs]))
    noise_levels = torch.tensor(levels, device=device)
    with ahead.collecting(family, transformer) as collected:
        family.predict(transformer, torch.zeros_like(batch["latents"]), noise_levels, batch)
    return collected


def pick_inputs(model: TrainingModel, sample: Batch) -> dict[str, Tensor]:
    """Pick from a sample what the modulation of the model's family depends on."""
    layers = model.family.modulation
    return {name: sample[name] for name in layers.inputs} if layers else {}
