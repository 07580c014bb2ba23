"""The windows of modulation ahead of time: which draws come, and what the transformer will be
conditioned on for them.

Windows are cut at fixed steps of a run and always computed whole, so a run that is resumed within
one has the same modulations, to the bit, as one that was never interrupted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autotune.data.batches import BatchOrder, Draw
from autotune.data.encode import EncodedDataset
from autotune.knobs.modulation import ModulationAhead, find_modulation_ahead, window_steps
from autotune.models.family import Batch, unwrap_model
from autotune.plan.workload import Bucket
from autotune.train.model import TrainingModel
from autotune.train.processes import Processes
from autotune.train.step import Noising


@dataclass(frozen=True)
class ConditionedImage:
    """What decides the modulation of one image of a step, besides its noise level."""

    latents_shape: Sequence[int]
    """(channels, frames, height, width)"""
    inputs: Batch
    """The tensors that the family's modulation depends on, without a batch dimension."""


@dataclass
class ModulationWindows:
    """Has the modulations of every step ready before it is taken."""

    model: TrainingModel
    ahead: ModulationAhead
    noising: Noising
    images: Callable[[int], Sequence[ConditionedImage]]
    """What this process sees in a step, in order."""
    images_per_step: int
    first_position: int
    """Position of the first of them in the effective batch."""
    place: Callable[[Batch], Batch]
    """Brings a batch to the device as steps get it."""
    share_seconds: float = 0.0
    """A step's share of the time that computing the newest window took."""
    _held: int = -1

    @cached_property
    def num_steps(self) -> int:
        """Steps of a window."""
        return window_steps(self.ahead.row_bytes, self.images_per_step)

    def prepare(self, step: int) -> None:
        """Compute the window that the step lies in, unless it is the one held."""
        window = step // self.num_steps
        if window == self._held:
            return
        started = time.perf_counter()
        steps = range(window * self.num_steps, (window + 1) * self.num_steps)
        draws = [
            (
                image,
                self.noising.level_at(step, self.first_position + position, image.latents_shape),
            )
            for step in steps
            for position, image in enumerate(self.images(step))
        ]
        self._held = -1  # an error may leave half a window
        inputs, levels = [image.inputs for image, _ in draws], [level for _, level in draws]
        collected = collect_conditionings(self.model, self.ahead, inputs, levels, self.place)
        self.ahead.hold(collected, self.num_steps * self.images_per_step)
        self._held, self.share_seconds = window, (time.perf_counter() - started) / self.num_steps


def make_windows(
    model: TrainingModel,
    encoded: EncodedDataset,
    order: BatchOrder,
    noising: Noising,
    processes: Processes,
    place: Callable[[Batch], Batch],
) -> ModulationWindows | None:
    """The windows of what this process sees in a run; None if the modulation layers are
    resident."""
    ahead = find_modulation_ahead(model.transformer)
    if ahead is None:
        return None
    known: dict[Draw, ConditionedImage] = {}
    rank, world_size = processes.rank, processes.world_size
    share = order.effective_batch_size // world_size

    def condition(draw: Draw) -> ConditionedImage:
        if draw not in known:  # so that each is read once in a run, and its prompt not kept
            sample = encoded.sample(*draw)
            known[draw] = ConditionedImage(
                tuple(sample["latents"].shape), pick_inputs(model, sample)
            )
        return known[draw]

    def images(step: int) -> list[ConditionedImage]:
        planned = order.micro_batches(step, share, rank=rank, world_size=world_size)
        return [condition(draw) for part in planned for draw in part.draws]

    return ModulationWindows(model, ahead, noising, images, share, rank * share, place)


def collect_conditionings(
    model: TrainingModel,
    ahead: ModulationAhead,
    inputs: Sequence[Batch],
    levels: Sequence[float],
    place: Callable[[Batch], Batch],
) -> dict[bytes, Tensor]:
    """What the transformer is conditioned on for images with these `ConditionedImage.inputs` at
    these noise levels.

    From calls of the transformer without its blocks, for the smallest image and one token of text
    each.
    """
    family, transformer, device = model.family, model.transformer, model.device
    side = family.size_multiple_px
    smallest = Bucket(width_px=side, height_px=side, num_frames=1, num_items=1)
    shapes = family.sample_shapes(unwrap_model(transformer).config, smallest, 1, 0)
    blank = {name: torch.zeros(shape) for name, shape in shapes.items()}
    batch = place(family.collate([{**blank, **each} for each in inputs]))
    noise_levels = torch.tensor(levels, device=device)
    with ahead.collecting(family, transformer) as collected:
        family.predict(transformer, torch.zeros_like(batch["latents"]), noise_levels, batch)
    return collected


def pick_inputs(model: TrainingModel, sample: Batch) -> dict[str, Tensor]:
    """The part of a sample that the modulation of the model's family depends on."""
    layers = model.family.modulation
    return {name: sample[name] for name in layers.inputs} if layers else {}
