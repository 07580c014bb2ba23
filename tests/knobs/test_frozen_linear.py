"""Layers on stored 8-bit weights compute with what is stored, keep no cast copy, and move no
more bytes than told."""

import pytest
import torch
from torch import Tensor, nn

from autotune.knobs import quantized_layers
from autotune.knobs.quantized_layers import (
    CONVERTS_AS_IT_READS,
    FrozenLinear,
    as_stored,
    quantize_inside,
)
from tests.profiled import peak_allocated_bytes

WEIGHT_FORMATS = ("torchao-int8", "torchao-fp8")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error that a few roundings to the dtype give outputs."""


def layer_of(
    storage: str, dtype: torch.dtype, *, bias: bool = True, device: str = "cpu"
) -> FrozenLinear:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias, dtype=dtype, device=device).requires_grad_(False)
    transform = quantize_inside([layer], storage)
    assert transform is not None
    transform("", layer)
    assert isinstance(layer, FrozenLinear)
    return layer


def weight_of(layer: FrozenLinear) -> Tensor:
    """What its stored numbers and scales mean, in fp64."""
    return as_stored(layer.weight).double() * layer.scale.double()[:, None]


def run(layer: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, output, gradient of the output and of the input."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    out = layer(x)
    given = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, given)
    return x.detach(), out.detach(), given, gradient


@pytest.mark.parametrize("converts_as_it_reads", [False, True])
@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_what_is_stored(
    storage, dtype, bias, converts_as_it_reads, monkeypatch
):
    monkeypatch.setitem(CONVERTS_AS_IT_READS, "cpu", converts_as_it_reads)
    layer = layer_of(storage, dtype, bias=bias)
    weight = weight_of(layer)
    x, out, given, gradient = run(layer, dtype)
    assert out.dtype == gradient.dtype == dtype
    wanted = x.double() @ weight.t() + (layer.bias.double() if bias else 0)
    for found, expected in ((out, wanted), (gradient, given.double() @ weight)):
        assert (found.double() - expected).norm() < ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_slices_give_the_same_bits_in_a_fraction_of_the_working_memory(storage, monkeypatch):
    slice_bytes = 1 << 18
    layers = [nn.Linear(1024, 4096, dtype=torch.bfloat16, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    peaks = []
    for layer, size in zip(layers, (slice_bytes, 8 << 20), strict=True):
        monkeypatch.setattr(quantized_layers, "slice_bytes_of", lambda _, size=size: size)
        transform = quantize_inside([layer], storage)
        peaks.append(
            peak_allocated_bytes(lambda t=transform, layer=layer: t("", layer))
            - (4 << 20)
            - 4 * 4096
        )
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[0].scale, layers[1].scale)
    assert peaks[0] < 4.1 * slice_bytes
    assert peaks[0] < peaks[1] / 3


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_weights_do_not_overflow_fp16_before_they_are_scaled(storage):
    layer = layer_of(storage, torch.float16)
    x = (60 * weight_of(layer)[0].sign()).half()[None].requires_grad_()
    assert not (x @ as_stored(layer.weight).half().t()).isfinite().all()
    out = layer(x)
    assert bool(out.isfinite().all())
    (gradient,) = torch.autograd.grad(100 * out.sum(), x)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_only_what_is_stored_is_kept_and_recomputing_changes_nothing(storage):
    layer, kept = layer_of(storage, torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True))
    assert {t.data_ptr() for t in kept} == {layer.weight.data_ptr(), layer.scale.data_ptr()}
    again = lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    for expected, found in zip(run(layer, torch.bfloat16), run(again, torch.bfloat16), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_a_compiler_traces_it_whole(storage):
    layer = layer_of(storage, torch.float32)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for expected, found in zip(run(layer, torch.float32), run(traced, torch.float32), strict=True):
        assert torch.equal(expected, found)
