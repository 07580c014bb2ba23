"""Measures, in the child, how far a candidate's adapter gradients and optimizer updates are from
the reference's.

Gradients are those of a tiny instance of the family's real class, against fp32; updates are held
against AdamW in fp64. All variants share weights, adapter and inputs, rounded to bf16 beforehand,
so that only what is computed differs.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autotune.knobs.settings import torch_dtype
from autotune.models.adapter import add_adapter
from autotune.models.family import denoising_loss
from autotune.models.registry import get_family
from autotune.plan.candidate import Candidate
from autotune.search.requests import ChildState, GradientRequest, UpdateRequest
from autotune.search.steps import longest_captions, synthetic_samples
from autotune.train.model import apply_knobs, find_token_multiple
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import to_device
from autotune.weights.stream import build_empty, cast_as_loaded, fill_random

NUM_UPDATES = 3
LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""In fp16, the first under which no gradient overflows, as a run finds its own."""
UPDATED_SHAPES = ((4, 64), (96, 4), (7,))
"""Shapes of the parameters that an optimizer updates; one is no multiple of any vector length."""


def gradient_error(request: GradientRequest, child: ChildState) -> float:
    """Relative error against fp32 with nothing quantized and nothing recomputed."""
    cache = child.cache
    torch.set_float32_matmul_precision("highest")
    if "plain" not in cache:
        cache["plain"] = _plain_transformer(request)
    key = f"reference {request.workload.text_padding} {request.reference_attention}"
    if key not in cache:
        size = request.candidate.micro_batch_size
        reference = Candidate(
            micro_batch_size=size,
            checkpointed_blocks=0,
            precision="fp32",
            attention=request.reference_attention,
        )
        cache[key] = _gradients(request, cache["plain"], reference)
    torch.set_float32_matmul_precision("high")  # as training
    return relative_error(_gradients(request, cache["plain"], request.candidate), cache[key])


def update_error(request: UpdateRequest, _: ChildState) -> float:
    """Relative error of an adapter's change over some steps, against plain AdamW in fp64."""
    generator, dtype = torch.Generator().manual_seed(0), torch_dtype(request.candidate.precision)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in UPDATED_SHAPES]
    parameters = [nn.Parameter(tensor.to(request.device, copy=True)) for tensor in start]
    own = AdapterOptimizer(parameters, learning_rate=1e-3, weight_decay=1e-2, max_grad_norm=1.0)
    plain = [nn.Parameter(tensor.double()) for tensor in start]
    adamw = torch.optim.AdamW(plain, lr=1e-3, weight_decay=1e-2, foreach=False, fused=False)
    for _step in range(NUM_UPDATES):
        for parameter, wanted in zip(own.parameters, plain, strict=True):
            gradient = (
                torch.randn(wanted.shape, generator=generator).div_(16).to(dtype)
            )  # fp16 has room for its scale
            parameter.grad, wanted.grad = own.scale(gradient.to(request.device)), gradient.double()
        own.step()
        nn.utils.clip_grad_norm_(plain, 1.0)
        adamw.step()

    def changes(parameters: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(parameters, start, strict=True)
        return [after.detach().double().cpu() - before.double() for after, before in pairs]

    return relative_error(changes(own.masters), changes(plain))


def relative_error(tensors: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> float:
    """Root mean square of the tensors' relative errors; a missing tensor counts as an error of 1.

    Tensors whose reference is missing or zero are left out; infinite if none is left.
    """
    errors = []
    for found, wanted in zip(tensors, reference, strict=True):
        size = 0.0 if wanted is None else float(wanted.norm())
        if wanted is None or size == 0.0:
            continue
        errors.append(1.0 if found is None else float((found - wanted).norm()) / size)
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors)) if errors else math.inf


def _plain_transformer(request: GradientRequest) -> nn.Module:
    family = get_family(request.family)
    transformer = build_empty(lambda: family.build_transformer(request.config), dtype=torch.float32)
    fill_random(transformer, device=request.device, seed=0)
    for parameter in transformer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return transformer.eval().requires_grad_(
        False
    )  # as loaded: block swap moves frozen weights only


def _gradients(
    request: GradientRequest, plain: nn.Module, candidate: Candidate
) -> list[Tensor | None]:
    family, dtype, work = (
        get_family(request.family),
        torch_dtype(candidate.precision),
        request.workload,
    )
    transformer = copy.deepcopy(plain)
    cast_as_loaded(transformer, dtype)
    apply_knobs(family, transformer, candidate, needs_reload=True)
    adapter = add_adapter(family, transformer, work, dtype)
    apply_knobs(family, transformer, candidate, needs_reload=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter:  # both halves away from zero, or half of the gradients would be zero
        values = torch.randn(parameter.shape, generator=generator) / max(parameter.shape)
        parameter.data.copy_(values.bfloat16())
    lengths = longest_captions(work, request.candidate.micro_batch_size)
    samples = synthetic_samples(
        family, request.config, work, work.largest_bucket, lengths, torch.bfloat16
    )
    device = torch.device(request.device)
    batch = to_device(
        family.collate(samples, find_token_multiple(candidate, device)), device, dtype
    )
    clean = batch["latents"]
    noise = torch.randn(clean.shape, generator=generator).bfloat16().to(clean)
    # Exact in bf16, a thousandfold too: rounded noise levels are other inputs, and time embeddings
    # magnify the change.
    shares = torch.linspace(0.25, 0.5, len(clean)).tolist()
    levels = torch.tensor([family.noise.level(share) for share in shares], device=clean.device)
    loss = denoising_loss(family, transformer, batch, noise, levels)
    scales = LOSS_SCALES if dtype == torch.float16 else (1.0,)
    for scale in scales:
        (loss * scale).backward(retain_graph=scale != scales[-1])  # type: ignore[no-untyped-call]
        found = [None if p.grad is None else p.grad.double().cpu() / scale for p in adapter]
        if all(gradient is None or gradient.isfinite().all() for gradient in found):
            break
        for parameter in adapter:
            parameter.grad = None
    return found
