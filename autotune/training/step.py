"""One optimizer step, shared by training and trials."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from autotune.families import PATCH, Batch, Family, flow_matching_loss
from autotune.schema import TimestepSampling, Weighting
from autotune.weights import attribute_tensors

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter."""


@dataclass(frozen=True)
class Noising:
    """What noise each image gets, and how its loss weighs. The density and the shift of noise levels are those of
    Stable Diffusion 3 (Esser et al. 2024, sections 3.1 and 5.3.2)."""

    seed: int = 0
    shift: float | Callable[[int], float] = 1.0
    """Towards noise, s * t / (1 + (s - 1) * t); perhaps by the number of tokens of an image."""
    sampling: TimestepSampling = "logit_normal"
    weighting: Weighting = "none"

    def draw(self, step: int, position: int, shape: Sequence[int]) -> tuple["Tensor", float]:
        """Noise of `shape` (channels, frames, height, width) and a level in [0, 1] for one image: a pure function of
        seed, step and place in the effective batch.

        So a run is the same whatever the micro-batch size, the number of processes or the step it was resumed at.
        """
        generator = torch.Generator().manual_seed(_seed_at(self.seed, step, position))
        level = self._level(generator, shape)
        return torch.randn(*shape, generator=generator), level

    def _level(self, generator: torch.Generator, shape: Sequence[int]) -> float:
        if self.sampling == "uniform":
            level = float(torch.rand((), generator=generator))
        else:
            level = 1 / (1 + math.exp(-float(torch.randn((), generator=generator))))
        shift = self.shift(math.prod(shape[1:]) // PATCH**2) if callable(self.shift) else self.shift
        return shift * level / (1 + (shift - 1) * level)

    def loss(self, family: Family, transformer: nn.Module, batch: Batch, step: int, position: int) -> "Tensor":
        """Mean loss of a micro-batch whose first image stands at `position` of its step."""
        clean = batch["latents"]
        draws = [self.draw(step, position + i, clean.shape[1:]) for i in range(len(clean))]
        noise = torch.stack([noise for noise, _ in draws]).to(clean)
        sigmas = torch.tensor([sigma for _, sigma in draws], device=clean.device)
        return flow_matching_loss(family, transformer, batch, noise, sigmas, self.weighting)


def _seed_at(seed: int, step: int, position: int) -> int:
    return ((seed * 1_000_003 + step) * 1_000_003 + position) % 2**63  # large seeds overflow torch's 64 bits


def _seed_dropout(device: torch.device, seed: int) -> None:
    """Its masks then depend on nothing that happened before. `torch.manual_seed` would take 90 us for all devices."""
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on `device`, its real numbers in the compute `dtype`; from pinned memory without waiting for it."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
        for name, tensor in batch.items()
    }


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step reports."""

    loss: float
    gradient_norm: float


class AdapterOptimizer:
    """AdamW on fp32 master copies of the adapter's parameters.

    A bf16 parameter loses updates smaller than 1/256 of itself; the masters keep them. For fp32 parameters the masters
    are the parameters themselves. Weight decay pulls both of LoRA's matrices, and so their product, towards zero: an
    adapter has no norms or biases, on which decay would do harm.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        self.parameters = list(parameters)
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters]
        self.max_grad_norm = max_grad_norm
        device = self.parameters[0].device
        self.adamw = torch.optim.AdamW(
            self.masters, lr=learning_rate, weight_decay=weight_decay, fused=device.type != "mps"
        )

    def step(self) -> "Tensor":
        """Clip, update and clear the gradients; returns the gradient norm before clipping."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    def forget(self) -> None:
        """Drop the gradients of a step that broke off: nothing of it is left, and it can be taken again."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None
        for master in self.masters:
            if not set(MOMENTS) <= self.adamw.state.get(master, {}).keys():
                self.adamw.state.pop(master, None)  # memory ran out between one moment and the next

    def _publish(self) -> None:
        if self.parameters[0] is not self.masters[0]:  # one launch for all on a GPU, where there may be a thousand
            torch._foreach_copy_([p.data for p in self.parameters], [master.data for master in self.masters])

    def state(self) -> "dict[str, Tensor]":
        """Masters and moments by name: with `load_state` a run goes on as if it had never stopped."""
        tensors = {}
        for number, master in enumerate(self.masters):
            tensors[f"{number:05}.master"] = master.detach()
            moments = self.adamw.state.get(master, {})
            tensors |= {f"{number:05}.{name}": moments[name] for name in MOMENTS if name in moments}
        return tensors

    def load_state(self, tensors: "Mapping[str, Tensor]") -> None:
        """Take over what `state` gave, on any device.

        Raises:
            KeyError, RuntimeError: it belongs to another adapter.
        """
        for number, master in enumerate(self.masters):
            master.data.copy_(tensors[f"{number:05}.master"])
            moments = {name: tensors.get(f"{number:05}.{name}") for name in MOMENTS}
            self.adamw.state[master] = {
                name: tensor.to(master.device, copy=True) for name, tensor in moments.items() if tensor is not None
            }
        self._publish()


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
    average: "Callable[[Tensor], None] | None" = None,
) -> StepOutcome:
    """Accumulate the gradients of all micro-batches of one effective batch, then update the adapter once.

    Each micro-batch weighs by its share of the effective batch, so an uneven split gives the same gradient. Of several
    processes each gets its own share: `effective_batch_size` counts the images of this one, `first_position` those
    of the processes before it, and `average` makes of the loss, in place, its mean over all. A transformer wrapped for
    several processes averages gradients by itself, once per step, in the backward pass of the last micro-batch.
    """
    total = torch.zeros((), dtype=torch.float32)
    position, end = first_position, first_position + effective_batch_size
    unsynchronized = getattr(transformer, "no_sync", contextlib.nullcontext)
    for batch in micro_batches:
        size = len(batch["latents"])
        with contextlib.nullcontext() if position + size == end else unsynchronized():
            _seed_dropout(batch["latents"].device, _seed_at(-1 - noising.seed, step, position))
            loss = noising.loss(family, transformer, batch, step, position) * (size / effective_batch_size)
            loss.backward()  # type: ignore[no-untyped-call]
        position += size
        total = total.to(loss.device) + loss.detach()
        del loss  # else what LLM.int8's layers keep, on their graph nodes, would stay through the next micro-batch
    norm = optimizer.step()
    if average:
        average(total)
    loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()  # one wait for the device, not two
    return StepOutcome(loss=loss_value, gradient_norm=norm_value)


def live_tensors(transformer: nn.Module, optimizer: AdapterOptimizer) -> list[torch.Tensor]:
    """What stays on the device between steps: weights, master weights and the optimizer's moments."""
    states = [value for state in optimizer.adamw.state.values() for value in state.values()]
    plain = attribute_tensors(transformer)
    return [*transformer.parameters(), *transformer.buffers(), *plain, *optimizer.masters, *states]
