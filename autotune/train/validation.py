"""The loss on held-out images at even quantiles of training's noise levels, always the same."""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch

from autotune.data.encode import EncodedDataset
from autotune.errors import is_out_of_memory
from autotune.events import StepFinished
from autotune.knobs.modulation import find_modulation_ahead
from autotune.models.family import Batch, image_losses
from autotune.plan.base import digest_of
from autotune.plan.job import VALIDATION_DRAWS, Job
from autotune.plan.plan import ValidationResult
from autotune.train import folder, model, monitor, optimizer
from autotune.train.processes import Processes
from autotune.train.step import Noising, collect_conditionings, pick_inputs

NOISE_STEP = 10**12  # after the last step of any run
NOT_FINITE = "the loss on held-out images is not finite"


class _Draw(NamedTuple):
    item: int
    number: int
    level: float


@dataclass
class HeldOutLoss:
    """The meter of the loss on held-out images; `place` brings batches to the device."""

    model: model.TrainingModel
    encoded: EncodedDataset
    noising: Noising
    place: Callable[[Batch], Batch]

    @property
    def digest(self) -> str:
        """Digest of the images: with losses on others, these are never compared."""
        return digest_of({"entries": [sorted(entries.keys) for entries in self.encoded.entries]})

    @cached_property
    def _draws(self) -> list[_Draw]:
        count, groups = len(self.encoded.items), self.encoded.groups
        rounds = max(1, round(VALIDATION_DRAWS / count))
        draws = []
        for index in sorted(range(count), key=lambda index: groups[index]):
            shape = self.encoded.sample(index)["latents"].shape
            for number in range(rounds):
                share = (number + (index + 0.5) / count) / rounds
                level = self.noising.level_of_quantile(share, shape)
                draws.append(_Draw(index, number * count + index, level))
        return draws

    @torch.no_grad()
    def measure(self, micro_batch_size: int) -> list[float]:
        """Return the loss of each draw, with the adapter as it is."""
        losses: list[float] = []
        by_group = groupby(self._draws, key=lambda draw: self.encoded.groups[draw.item])
        with model.eager_eval(self.model.transformer), self._modulations():
            for _, of_group in by_group:
                group = list(of_group)
                for start in range(0, len(group), micro_batch_size):
                    losses += self._losses(group[start : start + micro_batch_size])
        return losses

    def measure_base(self, micro_batch_size: int) -> list[float]:
        transformer = self.model.transformer
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        transformer.disable_adapters()  # type: ignore[operator]
        try:
            return self.measure(micro_batch_size)
        finally:
            transformer.enable_adapters()  # type: ignore[operator]
            for parameter in trained:  # disabling freezes them, too
                parameter.requires_grad_(True)

    def _losses(self, draws: Sequence[_Draw]) -> list[float]:
        family, noising = self.model.family, self.noising
        batch = self.place(self.model.collate([self.encoded.sample(draw.item) for draw in draws]))
        clean = batch["latents"]
        noises = [noising.draw(NOISE_STEP, draw.number, clean.shape[1:])[0] for draw in draws]
        noise = torch.stack(noises).to(clean)
        levels = torch.tensor([draw.level for draw in draws], device=clean.device)
        transformer, kind = self.model.transformer, (noising.process, noising.weighting)
        losses = image_losses(family, transformer, batch, noise, levels, *kind)
        return cast("list[float]", losses.tolist())

    def _modulations(self) -> contextlib.AbstractContextManager[None]:
        if (ahead := find_modulation_ahead(self.model.transformer)) is None:
            return contextlib.nullcontext()
        inputs = [pick_inputs(self.model, self.encoded.sample(draw.item)) for draw in self._draws]
        levels = [draw.level for draw in self._draws]
        collected = collect_conditionings(self.model, ahead, inputs, levels, self.place)
        return ahead.holding_also(collected)


@dataclass
class ValidationHistory:
    """Mean losses that a run has measured so far, the base's without the adapter."""

    base_loss: float
    best_loss: float = math.inf
    best_step: int = 0
    final_loss: float | None = None  # None if the last was not finite

    def add(self, step: int, losses: Sequence[float]) -> bool:
        """Count the measurement after `step`; return whether the adapter is the best so far."""
        loss = statistics.fmean(losses)
        self.final_loss = loss if math.isfinite(loss) else None
        is_best = math.isfinite(loss) and loss < self.best_loss
        if is_best:
            self.best_loss, self.best_step = loss, step
        return is_best


@dataclass
class Validation:
    """The measurements of a run, and the best adapter."""

    meter: HeldOutLoss | None
    job: Job
    num_steps: int
    optimizer: optimizer.AdapterOptimizer
    processes: Processes
    checkpoints: folder.Checkpoints
    monitor: monitor.Monitor
    on_warning: Callable[[str], None]
    history: ValidationHistory | None = None
    _told: bool = False

    def start(self, micro_batch_size: int) -> None:
        with self._measuring() as meter:
            if meter and self.history is None:
                base = statistics.fmean(meter.measure_base(micro_batch_size))
                if math.isfinite(base):
                    self.history = ValidationHistory(base)
                else:
                    goes_on = "the run goes on without measurements"
                    self.on_warning(f"{NOT_FINITE} without the adapter; {goes_on}")

    def measure_after(self, event: StepFinished, micro_batch_size: int) -> StepFinished:
        """Return the event of a step with the loss after it, if it is to be measured then."""
        every = self.job.validation_every
        if event.step != self.num_steps and not (every and event.step % every == 0):
            return event
        with self._measuring() as meter:
            if meter and self.history:
                with self.optimizer.averaged():
                    is_best = self.history.add(event.step, meter.measure(micro_batch_size))
                    if is_best and self.job.keep_best and self.processes.is_first:
                        self.checkpoints.save_best(event.step, self.optimizer.master_state())
                if self.history.final_loss is None and not self._told:
                    self._told = True
                    self.on_warning(f"{NOT_FINITE} after step {event.step}")
                final, base = self.history.final_loss, self.history.base_loss
                return event.changed(validation_loss=final, base_validation_loss=base)
        return event

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[HeldOutLoss | None]:
        processes = self.processes
        if self.meter is None:
            yield None
            return
        try:
            with self.monitor.phase("validation"):
                yield self.meter if processes.is_sampler else None
        except Exception as error:
            if processes.num_shards > 1 or not is_out_of_memory(error):
                raise
            what = "to measure the loss on held-out images; the run goes on without"
            self.on_warning(f"memory is too short {what}")
            self.history = None
        processes.wait()

    def keep_best(self) -> int:
        """Turn to the best adapter, if the job wants it; return the step that it was after."""
        history = self.history if self.job.keep_best and self.processes.is_first else None
        if history is None or history.best_step in (0, self.num_steps):
            return self.num_steps
        best = self.checkpoints.read_best()
        if best is None or best.step != history.best_step:
            self.on_warning("the best adapter cannot be read back: the last one is kept")
            return self.num_steps
        self.optimizer.load_masters(best.tensors)
        return best.step

    def state(self) -> dict[str, Any] | None:
        if self.meter is None or self.history is None:
            return None
        return {"images": self.meter.digest, "history": asdict(self.history)}

    def load_state(self, state: dict[str, Any] | None) -> None:
        if self.meter and state and state["images"] == self.meter.digest:
            self.history = ValidationHistory(**state["history"])

    def result(self, kept_step: int) -> ValidationResult | None:
        if self.meter is None or self.history is None or not self.history.best_step:
            return None
        return ValidationResult(
            num_images=len(self.meter.encoded.items),
            base_loss=self.history.base_loss,
            final_loss=self.history.final_loss,
            lowest_loss=self.history.best_loss,
            lowest_step=self.history.best_step,
            kept_step=kept_step,
        )
