"""Quantizing in slices gives the bits of quantizing whole, in a fraction of the working memory."""

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from autotune.quantization.torchao_layer import quantize_in_slices
from tests.profiled import peak_allocated_bytes

CONFIGS = [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_slices_give_the_same_bits(config: object, rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, rows, dtype=torch.bfloat16)
    weight = quantize_in_slices(layer.weight.data, config, slice_bytes=16 * 48 * 2)
    whole = nn.Linear(48, rows, dtype=torch.bfloat16)
    whole.load_state_dict(layer.state_dict())
    quantize_(whole, config)
    names, context = whole.weight.__tensor_flatten__()
    assert type(weight.data) is type(whole.weight.data)
    assert weight.__tensor_flatten__() == (names, context)
    for name in names:
        mine, theirs = getattr(weight, name), getattr(whole.weight, name)
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert nn.functional.linear(x, weight).equal(nn.functional.linear(x, whole.weight))


@pytest.mark.parametrize("config", CONFIGS)
def test_working_memory_is_of_a_slice(config: object) -> None:
    layer = nn.Linear(1024, 4096, dtype=torch.bfloat16)  # 8 MiB
    slice_bytes, stored = 1 << 18, 4 << 20
    sliced = peak_allocated_bytes(lambda: quantize_in_slices(layer.weight.data, config, slice_bytes)) - stored
    assert sliced < 20 * slice_bytes
    assert sliced < (peak_allocated_bytes(lambda: quantize_(layer, config)) - stored) / 3
