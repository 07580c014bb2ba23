"""Quantized layers give their reference's outputs and gradients, bit for bit, and keep no dequantized copy."""

import peft
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from autotune.quantization.layers import quantize_inside

WEIGHT_FORMATS = ("torchao-int8", "torchao-fp8", "layerwise-fp8")
TORCHAO = {"torchao-int8": Int8WeightOnlyConfig(), "torchao-fp8": Float8WeightOnlyConfig()}


class Cast(nn.Linear):
    """Leaves the cast copy to autograd."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.to(torch.float8_e4m3fn).to(input.dtype), self.bias)


def pair(storage: str, dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """The same quantized layer as torchao leaves it, or cast in its forward pass, and frozen."""
    layers = []
    for kind in (Cast if storage == "layerwise-fp8" else nn.Linear, nn.Linear):
        torch.manual_seed(0)
        layers.append(kind(64, 96, bias=bias).to(dtype).requires_grad_(False))
    if storage in TORCHAO:
        quantize_(layers[0], TORCHAO[storage])
    quantize_inside([layers[1]], storage)("", layers[1])
    return layers[0], layers[1]


def run(layer: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    out = layer(x)
    (gradient,) = torch.autograd.grad(out, x, torch.randn_like(out))
    return out.detach(), gradient


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_bit_equal(storage, dtype, bias):
    plain, frozen = pair(storage, dtype, bias=bias)
    for expected, found in zip(run(plain, dtype), run(frozen, dtype), strict=True):
        assert torch.equal(expected, found)


def test_int8_weights_do_not_overflow_fp16_before_they_are_scaled():
    plain, frozen = pair("torchao-int8", torch.float16)
    x = torch.full((1, 64), 60.0, dtype=torch.float16, requires_grad=True) * plain.weight.dequantize()[0].sign()
    assert not plain(x).isfinite().all()
    wanted = nn.functional.linear(x.float(), plain.weight.dequantize().float(), plain.bias.float())
    torch.testing.assert_close(frozen(x).float(), wanted, rtol=2e-3, atol=2e-2)
    (gradient,) = torch.autograd.grad(frozen(x).sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_only_the_stored_weight_is_kept(storage):
    plain, frozen = pair(storage, torch.bfloat16)
    weight = frozen.weight
    stored = {t.data_ptr() for t in ((weight.qdata, weight.scale) if hasattr(weight, "qdata") else (weight,))}
    for layer, copies in ((plain, True), (frozen, False)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            layer(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True))
        of_weight_size = [t for t in kept if t.numel() == 64 * 96 and t.data_ptr() not in stored]
        assert bool(of_weight_size) is copies


@pytest.mark.parametrize("storage", WEIGHT_FORMATS)
def test_recomputing_in_a_checkpoint_changes_nothing(storage):
    _, frozen = pair(storage, torch.bfloat16)
    checkpointed = lambda x: torch.utils.checkpoint.checkpoint(frozen, x, use_reentrant=False)  # noqa: E731
    for expected, found in zip(run(frozen, torch.bfloat16), run(checkpointed, torch.bfloat16), strict=True):
        assert torch.equal(expected, found)


def test_layerwise_float8_computes_what_diffusers_casting_does():
    torch.manual_seed(0)
    theirs, ours = nn.ModuleList([nn.Linear(64, 96, bias=False)]), nn.Linear(64, 96, bias=False)
    ours.load_state_dict(theirs[0].state_dict())
    apply_layerwise_casting(theirs, torch.float8_e4m3fn, torch.float32)
    quantize_inside([ours], "layerwise-fp8")("", ours)
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert torch.equal(theirs[0](x), ours(x))
    assert ours.weight.nbytes == 64 * 96


def test_an_adapter_on_float8_weights_starts_with_the_values_it_has_on_others():
    starts = []
    for storage in ("none", "layerwise-fp8", "torchao-int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
        if quantize := quantize_inside([model], storage):
            quantize("0", model[0])
        torch.manual_seed(1)
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["0"]), model)
        starts.append(model[0].lora_A["default"].weight.to(torch.bfloat16))
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
