"""The windows of modulation ahead of time: which draws come, and what the transformer will be conditioned on for them.

Windows are cut at fixed steps of a run and always computed whole, so a run that is resumed within one has the same
modulations, to the bit, as one that was never interrupted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autotune.data import BatchOrder, Draw, EncodedDataset
from autotune.families import Batch, unwrap_model
from autotune.knobs import ModulationAhead, find_modulation_ahead, window_steps
from autotune.schema import Bucket
from autotune.training.model import TrainingModel
from autotune.training.processes import Processes
from autotune.training.step import Noising


@dataclass(frozen=True)
class ConditionedImage:
    """What decides the modulation of one image of a step, besides its noise level."""

    latents_shape: Sequence[int]
    """(channels, frames, height, width)"""
    inputs: Batch
    """The tensors that the family's modulation depends on, without a batch dimension."""


class ModulationWindows:
    """Has the modulations of every step ready before it is taken.

    Args:
        model: whose modulations are computed ahead.
        ahead: what computes and holds them.
        noising: draws the noise levels.
        images: what this process sees in a step, in order.
        images_per_step: how many these are.
        first_position: of the first of them in the effective batch.
        place: brings a batch to the device as steps get it.
    """

    def __init__(
        self,
        model: TrainingModel,
        ahead: ModulationAhead,
        noising: Noising,
        images: Callable[[int], Sequence[ConditionedImage]],
        images_per_step: int,
        first_position: int,
        place: Callable[[Batch], Batch],
    ) -> None:
        self.model, self.ahead, self.noising = model, ahead, noising
        self.images, self.place, self.first_position = images, place, first_position
        self.num_steps = window_steps(ahead.row_bytes, images_per_step)
        self.capacity = self.num_steps * images_per_step
        self.share_seconds = 0.0
        """A step's share of the time that computing the newest window took."""
        self._held = -1

    def prepare(self, step: int) -> None:
        """Compute the window that the step lies in, unless it is the one held."""
        window = step // self.num_steps
        if window == self._held:
            return
        started = time.perf_counter()
        steps = range(window * self.num_steps, (window + 1) * self.num_steps)
        draws = [
            (image, self.noising.level_at(step, self.first_position + position, image.latents_shape))
            for step in steps
            for position, image in enumerate(self.images(step))
        ]
        self._held = -1  # an error may leave half a window
        self._compute([image for image, _ in draws], [level for _, level in draws])
        self._held, self.share_seconds = window, (time.perf_counter() - started) / self.num_steps

    def _compute(self, images: Sequence[ConditionedImage], levels: Sequence[float]) -> None:
        collected = collect_conditionings(
            self.model, self.ahead, [image.inputs for image in images], levels, self.place
        )
        self.ahead.hold(collected, self.capacity)


def make_windows(
    model: TrainingModel,
    encoded: EncodedDataset,
    order: BatchOrder,
    noising: Noising,
    processes: Processes,
    place: Callable[[Batch], Batch],
) -> ModulationWindows | None:
    """The windows of what this process sees in a run; None if the modulation layers are resident."""
    ahead = find_modulation_ahead(model.transformer)
    if ahead is None:
        return None
    known: dict[Draw, ConditionedImage] = {}
    rank, world_size = processes.rank, processes.world_size
    share = order.effective_batch_size // world_size

    def condition(draw: Draw) -> ConditionedImage:
        if draw not in known:  # so that each is read once in a run, and its prompt not kept
            sample = encoded.sample(*draw)
            known[draw] = ConditionedImage(tuple(sample["latents"].shape), pick_inputs(model, sample))
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
    """What the transformer is conditioned on for images with these `ConditionedImage.inputs` at these noise levels.

    From calls of the transformer without its blocks, for the smallest image and one token of text each.
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
    """Of a sample, what the modulation of the model's family depends on."""
    layers = model.family.modulation
    return {name: sample[name] for name in layers.inputs} if layers else {}
