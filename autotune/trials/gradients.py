"""Adapter gradients of a tiny instance of a family's real class, in the child: how far a candidate's are from fp32's.

And what its optimizer makes of gradients: how far the updates are from those of AdamW in fp64.

All variants share weights, adapter and inputs, rounded to bf16 beforehand, so that only what is computed differs.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.schema import Candidate, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autotune.families.base import Family

UPDATES = 3
UPDATED = ((4, 64), (96, 4), (7,))
"""Shapes that an optimizer is held against the reference with; one is no multiple of any vector length."""
RANK = 4
"""Of the tiny adapter: how it is multiplied does not depend on it."""


@dataclass(frozen=True)
class GradientRequest:
    """One candidate to hold against the reference. The answer is the root mean square of its tensors' errors."""

    family: str
    config: Mapping[str, Any]
    """Constructor arguments of the tiny transformer."""
    workload: Workload
    """Shapes to run, small ones."""
    candidate: Candidate
    device: str

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> float:
        """Relative error against fp32 with native attention, nothing quantised, nothing recomputed."""
        import torch

        torch.set_float32_matmul_precision("highest")
        if "plain" not in kept:
            kept["plain"] = _plain_transformer(self)
        key = f"reference {self.workload.text_padding}"
        if key not in kept:
            kept[key] = _gradients(self, kept["plain"], _reference(self.candidate))
        torch.set_float32_matmul_precision("high")  # as training
        return relative_error(_gradients(self, kept["plain"], self.candidate), kept[key])


@dataclass(frozen=True)
class UpdateRequest:
    """An optimizer to hold against the reference. The answer is the root mean square of its tensors' errors."""

    candidate: Candidate
    device: str

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> float:
        """Relative error of how far an adapter moves in some steps, against plain AdamW in fp64."""
        import torch
        from torch import nn

        from autotune.knobs.precision import torch_dtype
        from autotune.training.step import AdapterOptimizer

        generator, dtype = torch.Generator().manual_seed(0), torch_dtype(self.candidate.precision)
        start = [torch.randn(shape, generator=generator).to(dtype) for shape in UPDATED]
        wishes = {"learning_rate": 1e-3, "weight_decay": 1e-2, "max_grad_norm": 1.0}
        own = AdapterOptimizer([nn.Parameter(tensor.to(self.device, copy=True)) for tensor in start], **wishes)
        plain = [nn.Parameter(tensor.double()) for tensor in start]
        adamw = torch.optim.AdamW(plain, lr=1e-3, weight_decay=1e-2, foreach=False, fused=False)
        for _ in range(UPDATES):
            for parameter, wanted in zip(own.parameters, plain, strict=True):
                gradient = torch.randn(wanted.shape, generator=generator).to(dtype)
                parameter.grad, wanted.grad = gradient.to(self.device), gradient.double()
            own.step()
            nn.utils.clip_grad_norm_(plain, 1.0)
            adamw.step()
        moves = (
            [
                parameter.detach().double().cpu() - before.double()
                for parameter, before in zip(moved, start, strict=True)
            ]
            for moved in (own.masters, plain)
        )
        return relative_error(*moves)


def _reference(candidate: Candidate) -> Candidate:
    """The same batch with every other knob at what changes nothing."""
    return Candidate(micro_batch_size=candidate.micro_batch_size, checkpointed_blocks=0, precision="fp32")


def relative_error(gradients: "Sequence[torch.Tensor | None]", reference: "Sequence[torch.Tensor | None]") -> float:
    """Root mean square of the tensors' relative errors; a gradient that is missing is wrong by all of itself."""
    errors = []
    for found, wanted in zip(gradients, reference, strict=True):
        size = 0.0 if wanted is None else float(wanted.norm())
        if wanted is None or size == 0.0:
            continue
        errors.append(1.0 if found is None else float((found - wanted).norm()) / size)
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors)) if errors else math.inf


def _plain_transformer(request: GradientRequest) -> "nn.Module":
    import torch

    from autotune.families.registry import family_named
    from autotune.weights.building import build_empty
    from autotune.weights.streaming import fill_random

    family = family_named(request.family)
    transformer = build_empty(lambda: family.build_transformer(request.config), dtype=torch.float32)
    fill_random(transformer, device=request.device, seed=0)
    for parameter in transformer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return transformer.eval()


def _gradients(request: GradientRequest, plain: "nn.Module", candidate: Candidate) -> "list[torch.Tensor | None]":
    import torch

    from autotune.families.adapter import add_adapter
    from autotune.families.loss import flow_matching_loss
    from autotune.families.precision import cast_as_loaded
    from autotune.families.registry import family_named
    from autotune.knobs.precision import torch_dtype
    from autotune.knobs.registry import KNOBS

    family, dtype = family_named(request.family), torch_dtype(candidate.precision)
    transformer = copy.deepcopy(plain)
    cast_as_loaded(transformer, dtype)
    for knob in KNOBS:
        if knob.needs_reload:
            knob.apply(transformer, family, getattr(candidate, knob.name))
    adapter = add_adapter(
        family, transformer, rank=RANK, lora_alpha=RANK, targets=request.workload.targets, dtype=dtype
    )
    for knob in KNOBS:
        if not knob.needs_reload:
            knob.apply(transformer, family, getattr(candidate, knob.name))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter:  # both halves away from zero, or half of the gradients would be zero
        values = torch.randn(parameter.shape, generator=generator) / max(parameter.shape)
        parameter.data.copy_(values.bfloat16())
    batch = {
        name: tensor.to(request.device, dtype if tensor.is_floating_point() else None)
        for name, tensor in _batch(request, family).items()
    }
    clean = batch["latents"]
    noise = torch.randn(clean.shape, generator=generator).bfloat16().to(clean)
    # Exact in bf16, a thousandfold too: rounded noise levels are other inputs, and time embeddings magnify the change.
    sigmas = torch.linspace(0.25, 0.5, len(clean), device=clean.device)
    flow_matching_loss(family, transformer, batch, noise, sigmas, "none").backward()  # type: ignore[no-untyped-call]
    return [None if p.grad is None else p.grad.double().cpu() for p in adapter]


def _batch(request: GradientRequest, family: "Family") -> "dict[str, torch.Tensor]":
    import torch

    from autotune.training.model import synthetic_samples

    samples = synthetic_samples(
        family, request.config, request.workload, request.candidate.micro_batch_size, torch.bfloat16
    )
    return family.collate(samples)
