"""Layers on stored 8-bit weights compute with what is stored, and keep nothing else."""

import pytest
import torch
from torch import nn

from autotune.knobs import quantized_layers
from autotune.knobs.quantized_layers import FLOAT8, PRODUCT_KERNELS, as_stored, quantize_inside
from tests.builders import FP8_PRODUCTS
from tests.profiled import peak_allocated_bytes

CONVERTED = ("torchao-int8", "torchao-fp8")
MULTIPLIED = ("int8-rotated", "fp8-matmul")
# Relative error that a few roundings to the dtype give outputs.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def layer_of(storage, dtype=torch.float32, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).to(dtype).requires_grad_(False)
    if storage in MULTIPLIED:
        layer.weight.data *= torch.linspace(0.01, 10, 96, dtype=dtype)[:, None]  # scales differ
    transform = quantize_inside([layer], storage)
    assert transform is not None
    transform("", layer)
    assert hasattr(layer, "scale")
    return layer


def turned(x, layer):
    """Rows in fp64, in the layer's basis, or back from there."""
    rotation = getattr(layer, "rotation", None)
    return x.double() if rotation is None else x.double() @ rotation.double()


def weight_of(layer):
    return as_stored(layer.weight).double() * layer.scale.double()[:, None]


def input_of(dtype=torch.float32):
    return torch.randn(2, 5, 64, dtype=dtype, generator=torch.Generator().manual_seed(1))


def run(layer, x):
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    out = layer(x)
    given = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, given)
    return out.detach(), given, gradient


@pytest.mark.parametrize("converts_as_it_reads", [False, True])
@pytest.mark.parametrize("storage", CONVERTED)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
def test_stored_weights_give_their_products(
    storage, dtype, bias, converts_as_it_reads, monkeypatch
):
    monkeypatch.setitem(quantized_layers.CONVERTS_AS_IT_READS, "cpu", converts_as_it_reads)
    layer, x = layer_of(storage, dtype, bias=bias), input_of(dtype)
    weight = weight_of(layer)
    out, given, gradient = run(layer, x)
    assert out.dtype == gradient.dtype == dtype
    wanted = x.double() @ weight.t() + (layer.bias.double() if bias else 0)
    for found, expected in ((out, wanted), (gradient, given.double() @ weight)):
        assert (found.double() - expected).norm() < ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("storage", CONVERTED)
def test_slices_need_less_memory(storage, monkeypatch):
    slice_bytes = 1 << 16
    layers = [nn.Linear(1024, 1024, dtype=torch.bfloat16, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    peaks = []
    for layer, size in zip(layers, (slice_bytes, 8 << 20), strict=True):
        monkeypatch.setattr(quantized_layers, "slice_bytes_of", lambda _, size=size: size)
        transform = quantize_inside([layer], storage)
        peak = peak_allocated_bytes(lambda t=transform, layer=layer: t("", layer))
        peaks.append(peak - (1 << 20) - 4 * 1024)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[0].scale, layers[1].scale)
    assert peaks[0] < 4.1 * slice_bytes
    assert peaks[0] < peaks[1] / 3


@pytest.mark.parametrize("storage", CONVERTED)
def test_stored_weights_do_not_overflow_fp16(storage):
    layer = layer_of(storage, torch.float16)
    x = (60 * weight_of(layer)[0].sign()).half()[None].requires_grad_()
    assert not (x @ as_stored(layer.weight).half().t()).isfinite().all()
    out = layer(x)
    assert bool(out.isfinite().all())
    (gradient,) = torch.autograd.grad(100 * out.sum(), x)
    assert bool(gradient.isfinite().all())


@pytest.mark.quick("torchao-int8", "int8-rotated")
@pytest.mark.parametrize("storage", ["torchao-int8", "int8-rotated", FP8_PRODUCTS])
def test_a_compiler_traces_it_whole(storage):
    layer = layer_of(storage)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for expected, found in zip(run(layer, input_of()), run(traced, input_of()), strict=True):
        assert torch.equal(expected, found)


def rounded(x, storage):
    largest = 127 if storage == "int8-rotated" else 448
    scale = (x.abs().amax(-1, keepdim=True) / largest).double()
    ratio = x.double() / scale
    return (ratio.round() if largest == 127 else ratio.float().to(FLOAT8).double()) * scale


@pytest.mark.parametrize("storage", ["int8-rotated", FP8_PRODUCTS])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_of_rounded_rows(storage, bias):
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=bias)
    layer, x = layer_of(storage, bias=bias), torch.randn(7, 64)
    weight = plain.weight * torch.linspace(0.01, 10, 96)[:, None]
    assert torch.allclose(weight_of(layer), rounded(turned(weight, layer), storage))
    out, given, gradient = run(layer, x)
    expected = rounded(turned(x, layer), storage) @ weight_of(layer).t()
    expected += plain.bias.double() if bias else 0
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-4)
    expected = rounded(given * layer.scale, storage) @ as_stored(layer.weight).double()
    assert torch.allclose(gradient.double(), turned(expected, layer), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [64, 80, 320])
def test_int8_withstands_a_large_channel(columns):
    torch.manual_seed(0)
    layer, x = nn.Linear(columns, 96, bias=False), torch.randn(50, columns)
    x[:, 3] *= 30
    expected = x @ layer.weight.t()
    transform = quantize_inside([layer], "int8-rotated")
    assert transform is not None
    transform("", layer)
    assert (layer(x) - expected).norm() < 0.012 * expected.norm()  # 5% unrotated


@pytest.mark.parametrize("storage", ["int8-rotated", FP8_PRODUCTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (32, 64), (2, 20, 64)])
def test_cuda_limits_change_no_result(storage, dtype, shape, monkeypatch):
    layer, x = layer_of(storage, dtype), torch.randn(shape, dtype=dtype)
    plain, seen, product = run(layer, x), [], torch._int_mm

    def checked(left, right):
        seen.append(len(left))
        assert len(left) >= 32
        assert left.is_contiguous()
        assert right.stride(0) == 1
        return product(left, right)

    monkeypatch.setattr(torch, "_int_mm", checked)
    limits = PRODUCT_KERNELS["cpu"]._replace(has_cuda_limits=True)
    monkeypatch.setitem(PRODUCT_KERNELS, "cpu", limits)
    limited = run(layer, x.mT.contiguous().mT)  # in another order in memory
    assert len(seen) == (2 if storage == "int8-rotated" else 0)
    for found, expected in zip(limited, plain, strict=True):
        assert found.dtype == expected.dtype == dtype
        if storage == "int8-rotated":
            assert torch.equal(found, expected)
        else:  # its kernels write bf16
            assert torch.allclose(found, expected, rtol=0.01, atol=1e-2)


@pytest.mark.parametrize("storage", ["int8-rotated", FP8_PRODUCTS])
def test_infinite_numbers_are_not_hidden(storage):
    layer, x = layer_of(storage), torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = layer(x)
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())
