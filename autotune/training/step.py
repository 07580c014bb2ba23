"""One optimizer step, shared by training and trials."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from autotune.families.base import Batch, Family
from autotune.families.loss import flow_matching_loss

if TYPE_CHECKING:
    from torch import Tensor


def draw(seed: int, step: int, position: int, shape: Sequence[int], shift: float) -> tuple["Tensor", float]:
    """Noise of `shape` and a noise level for one image: a pure function of seed, step and place in the effective batch.

    So a run is the same whatever the micro-batch size, the number of processes or the step it was resumed at.
    The level is logit-normal, then shifted towards noise, s * t / (1 + (s - 1) * t): the density and the shift of
    Stable Diffusion 3 (Esser et al. 2024, sections 3.1 and 5.3.2).
    """
    place = (seed * 1_000_003 + step) * 1_000_003 + position
    generator = torch.Generator().manual_seed(place % 2**63)  # large seeds overflow torch's 64 bits
    level = float(torch.sigmoid(torch.randn((), generator=generator)))
    return torch.randn(*shape, generator=generator), shift * level / (1 + (shift - 1) * level)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step reports."""

    loss: float
    gradient_norm: float


class AdapterOptimizer:
    """AdamW on fp32 master copies of the adapter's parameters.

    A bf16 parameter loses updates smaller than 1/256 of itself; the masters keep them. For fp32 parameters the masters
    are the parameters themselves.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        self.parameters = list(parameters)
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters]
        self.max_grad_norm = max_grad_norm
        self.adamw = torch.optim.AdamW(
            self.masters, lr=learning_rate, weight_decay=weight_decay, fused=self.parameters[0].device.type != "mps"
        )

    def step(self) -> float:
        """Clip, update and clear the gradients; returns the gradient norm before clipping."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.data.copy_(master.data)
        return float(norm)


def optimizer_step(
    family: Family,
    transformer: nn.Module,
    optimizer: AdapterOptimizer,
    micro_batches: Iterable[Batch],
    *,
    effective_batch_size: int,
    timestep_shift: float,
    seed: int,
    step: int,
) -> StepOutcome:
    """Accumulate the gradients of all micro-batches of one effective batch, then update the adapter once.

    Each micro-batch weighs by its share of the effective batch, so an uneven split gives the same gradient.
    """
    total = torch.zeros((), dtype=torch.float32)
    position = 0
    for batch in micro_batches:
        clean = batch["latents"]
        draws = [draw(seed, step, position + i, clean.shape[1:], timestep_shift) for i in range(len(clean))]
        position += len(clean)
        noise = torch.stack([noise for noise, _ in draws]).to(clean)
        sigmas = torch.tensor([sigma for _, sigma in draws], device=clean.device)
        loss = flow_matching_loss(family, transformer, batch, noise, sigmas) * (len(clean) / effective_batch_size)
        loss.backward()  # type: ignore[no-untyped-call]
        total = total.to(loss.device) + loss.detach()
    norm = optimizer.step()
    return StepOutcome(loss=float(total), gradient_norm=norm)
