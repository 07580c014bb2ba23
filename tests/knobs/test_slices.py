"""Quantizing in slices gives the bits of quantizing whole, in a fraction of the working memory."""

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from autotune.knobs import quantization
from autotune.quantization.layers import quantized_in_slices, torchao_config
from tests.profiled import peak_allocated_bytes


@pytest.mark.parametrize("choice", ["torchao-int8", "torchao-fp8"])
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_slices_give_the_same_bits(choice: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, rows, dtype=torch.bfloat16)
    monkeypatch.setattr(quantization, "CPU_SLICE_BYTES", 16 * 48 * 2)
    weight = quantized_in_slices(layer, torchao_config(choice))
    whole = nn.Linear(48, rows, dtype=torch.bfloat16)
    whole.load_state_dict(layer.state_dict())
    quantize_(whole, torchao_config(choice))
    names, context = whole.weight.__tensor_flatten__()
    assert type(weight.data) is type(whole.weight.data)
    assert weight.__tensor_flatten__() == (names, context)
    for name in names:
        mine, theirs = getattr(weight, name), getattr(whole.weight, name)
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert nn.functional.linear(x, weight).equal(nn.functional.linear(x, whole.weight))


@pytest.mark.parametrize("choice", ["torchao-int8", "torchao-fp8"])
def test_working_memory_is_of_a_slice(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1024, 4096, dtype=torch.bfloat16)  # 8 MiB
    monkeypatch.setattr(quantization, "CPU_SLICE_BYTES", 1 << 18)

    stored = 4 << 20
    sliced = peak_allocated_bytes(lambda: quantized_in_slices(layer, torchao_config(choice))) - stored
    assert sliced < 20 * (1 << 18)
    assert sliced < (peak_allocated_bytes(lambda: quantize_(layer, torchao_config(choice))) - stored) / 3
