"""Quantised layers give torchao's own outputs and gradients, bit for bit, and keep no dequantised copy."""

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from autotune.knobs.frozen_linear import freeze
from autotune.knobs.quantization import _torchao_config

STORAGES = ("torchao-int8", "torchao-fp8")


def pair(storage: str, dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """The same quantised layer as torchao leaves it, and frozen."""
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Linear(64, 96, bias=bias).to(dtype).requires_grad_(False)
        quantize_(layer, _torchao_config(storage))
        layers.append(layer)
    freeze(layers[1])
    return layers[0], layers[1]


def run(layer: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    out = layer(x)
    (gradient,) = torch.autograd.grad(out, x, torch.randn_like(out))
    return out.detach(), gradient


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_bit_equal(storage, dtype, bias):
    plain, frozen = pair(storage, dtype, bias=bias)
    for expected, found in zip(run(plain, dtype), run(frozen, dtype), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("storage", STORAGES)
def test_only_the_stored_weight_is_kept(storage):
    plain, frozen = pair(storage, torch.bfloat16)
    stored = {t.data_ptr() for t in (frozen.weight.qdata, frozen.weight.scale)}
    for layer, copies in ((plain, True), (frozen, False)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            layer(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True))
        of_weight_size = [t for t in kept if t.numel() == 64 * 96 and t.data_ptr() not in stored]
        assert bool(of_weight_size) is copies


@pytest.mark.parametrize("storage", STORAGES)
def test_recomputing_in_a_checkpoint_changes_nothing(storage):
    _, frozen = pair(storage, torch.bfloat16)
    checkpointed = lambda x: torch.utils.checkpoint.checkpoint(frozen, x, use_reentrant=False)  # noqa: E731
    for expected, found in zip(run(frozen, torch.bfloat16), run(checkpointed, torch.bfloat16), strict=True):
        assert torch.equal(expected, found)
