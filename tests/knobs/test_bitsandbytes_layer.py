"""bitsandbytes' layer as we make it: its bits in less memory, and right gradients."""

import pytest
import torch
from torch import nn

from autotune.knobs.quantized_layers import quantize_inside

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from bitsandbytes import functional

from autotune.knobs.quantized_layers import pack_nf4
from tests.profiled import peak_allocated_bytes

SLICE_BYTES = 1 << 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 64), (33, 48), (1, 2), (5, 2000)])
def test_slices_give_bits_of_whole(shape, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], dtype=dtype)
    four = pack_nf4(layer.weight.data, SLICE_BYTES)
    whole, state = functional.quantize_4bit(
        layer.weight.data, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(four.data, whole)
    mine, theirs = (one.as_dict(packed=True) for one in (four.quant_state, state))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_quantizing_takes_result_and_some_slices():
    weight = torch.randn(1024, 1024, dtype=torch.bfloat16)  # 2 MiB
    slice_bytes = 1 << 16
    stored = weight.numel() // 2
    sliced = peak_allocated_bytes(lambda: pack_nf4(weight, slice_bytes)) - stored
    assert sliced < 20 * slice_bytes
    assert sliced < (peak_allocated_bytes(lambda: pack_nf4(weight, 1 << 30)) - stored) / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [96, 40])
def test_inference_changes_no_later_pass(rows, dtype):
    """bitsandbytes would repack 4-bit weights of multiples of 32 rows for inference, for good."""
    torch.manual_seed(0)
    layer = nn.Linear(128, rows, dtype=dtype).requires_grad_(False)
    quantized = quantize_inside([layer], "bnb-nf4")("", layer).eval()
    x = torch.randn(2, 5, 128, dtype=dtype)

    def run():
        given = x.clone().requires_grad_()
        out = quantized(given)
        (gradient,) = torch.autograd.grad(out, given, torch.ones_like(out))
        return out.detach(), gradient

    before = run()
    with torch.no_grad():
        assert torch.equal(quantized(x), before[0])
    for found, expected in zip(run(), before, strict=True):
        assert torch.equal(found, expected)
    plain = torch.ones(2, 5, rows, dtype=dtype) @ layer.weight
    assert float((before[1] - plain).norm() / plain.norm()) < 0.15
