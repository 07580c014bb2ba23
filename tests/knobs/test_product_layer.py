"""Layers that multiply in 8 bits: what they compute, what they keep, and what kernels on CUDA
ask of them."""

import pytest
import torch
from torch import Tensor, nn

from autotune.knobs.quantized_layers import (
    FLOAT8,
    PLAIN,
    PRODUCT_KERNELS,
    EightBitLinear,
    quantize_inside,
)

FORMATS = ("int8-matmul", "fp8-matmul")


def layer_of(
    weight_format: str, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> EightBitLinear:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).to(dtype).requires_grad_(False)
    layer.weight.data *= torch.linspace(0.01, 10, 96, dtype=dtype)[:, None]  # scales differ
    transform = quantize_inside([layer], weight_format)
    assert transform is not None
    transform("", layer)
    assert isinstance(layer, EightBitLinear)
    return layer


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    given = x.clone().requires_grad_()
    out = layer(given)
    (gradient,) = torch.autograd.grad(out, given, torch.randn_like(out))
    return out.detach(), gradient


def rounded(x: Tensor, weight_format: str) -> Tensor:
    """Rows as they are when they have gone through 8 bits, in fp64."""
    largest = 127 if weight_format == "int8-matmul" else 448
    scale = (x.abs().amax(-1, keepdim=True) / largest).double()
    ratio = x.double() / scale
    return (ratio.round() if largest == 127 else ratio.float().to(FLOAT8).double()) * scale


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_products_of_rounded_rows(weight_format: str, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=bias)
    layer, x = layer_of(weight_format, bias=bias), torch.randn(7, 64)
    scale = layer.scale.double()[:, None]
    stored = layer.weight.view(FLOAT8) if layer.weight.dtype == torch.uint8 else layer.weight
    weight = plain.weight * torch.linspace(0.01, 10, 96)[:, None]
    assert torch.equal(stored.double() * scale, rounded(weight, weight_format))
    out, gradient = run(layer, x)
    expected = rounded(x, weight_format) @ (stored.double() * scale).t() + (
        plain.bias.double() if bias else 0
    )
    torch.manual_seed(2)
    folded = torch.randn(7, 96) * layer.scale
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(
        gradient.double(), rounded(folded, weight_format) @ stored.double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (31, 64), (32, 64), (2, 5, 64), (2, 20, 64)])
def test_what_kernels_on_cuda_ask_for_changes_no_result(
    weight_format: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(weight_format, dtype), torch.randn(shape, dtype=dtype)
    plain, seen = run(layer, x), []

    def checked(left: Tensor, right: Tensor) -> Tensor:
        seen.append(len(left))
        assert len(left) >= 32
        assert left.is_contiguous()
        assert right.stride(0) == 1
        return product(left, right)

    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", checked)
    monkeypatch.setitem(PRODUCT_KERNELS, "cpu", PLAIN._replace(has_cuda_limits=True))
    limited = run(layer, x.mT.contiguous().mT)  # in another order in memory
    assert len(seen) == (2 if weight_format == "int8-matmul" else 0)
    for found, expected in zip(limited, plain, strict=True):
        assert found.dtype == expected.dtype == dtype
        if weight_format == "int8-matmul":
            assert torch.equal(found, expected)
        else:  # its kernels write bf16
            assert torch.allclose(found, expected, rtol=0.01, atol=1e-2)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_not_finite_is_not_hidden(weight_format: str) -> None:
    layer, x = layer_of(weight_format), torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = layer(x)
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())


@pytest.mark.parametrize("weight_format", FORMATS)
def test_only_the_stored_weight_is_kept_and_recomputing_changes_nothing(weight_format: str) -> None:
    layer, kept = layer_of(weight_format, torch.bfloat16), []
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.clone().requires_grad_())
    assert {t.data_ptr() for t in kept} == {layer.weight.data_ptr(), layer.scale.data_ptr()}
    again = nn.Module()
    again.forward = lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
    for expected, found in zip(run(layer, x), run(again, x), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_compiler_traces_it_whole(weight_format: str) -> None:
    layer, x = layer_of(weight_format), torch.randn(2, 5, 64)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for expected, found in zip(run(layer, x), run(traced, x), strict=True):
        assert torch.equal(expected, found)
