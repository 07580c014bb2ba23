"""LoRA and LoKr layers compute what peft's do, and keep no more for the backward pass."""

import copy

import pytest
import torch
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import nn

from autotune.knobs.quantized_layers import quantize_inside
from autotune.models.low_rank import LeanLokr, LeanLora, make_lean
from tests.builders import BITSANDBYTES, FP8_PRODUCTS

FORMATS = ["none", "torchao-int8", "torchao-fp8", "int8-rotated", FP8_PRODUCTS]


LOKR = {"product": (4, -1), "whole": (16, 4)}  # rank and factor


def pair(weight_format="none", *, alpha=16.0, dropout=0.0, dtype=torch.float32, lokr=None):
    """The same adapted layer with peft's forward pass and with ours; none of its halves is zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128)).to(dtype).requires_grad_(False)
    if transform := quantize_inside([model], weight_format):
        model[0] = transform("0", model[0]) or model[0]
    config = LoraConfig(r=16, lora_alpha=alpha, lora_dropout=dropout, target_modules=["0"])
    if lokr:
        rank, factor = LOKR[lokr]
        config = LoKrConfig(r=rank, alpha=alpha, decompose_factor=factor, target_modules=["0"])
    inject_adapter_in_model(config, model)
    model.train(not lokr)  # in which peft's LoKr draws a number for a dropout
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape).to(dtype) / 8
    ours = copy.deepcopy(model)
    make_lean(ours)
    assert isinstance(ours[0], LeanLokr if lokr else LeanLora)
    return model, ours


def run(model, *, of_input=True):
    parameters = [p for p in model.parameters() if p.requires_grad]
    dtype = parameters[0].dtype
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, dtype=dtype).requires_grad_(of_input)
    out = model(x)
    out.backward(torch.randn(out.shape, dtype=dtype))
    return [out.detach(), *([x.grad] if of_input else []), *(p.grad for p in parameters)]


def assert_same(found, expected, tolerance=1e-6):
    assert len(found) == len(expected)
    for ours, peft in zip(found, expected, strict=True):
        assert ours.shape == peft.shape
        assert float((ours - peft).norm()) <= tolerance * float(peft.norm())


@pytest.mark.parametrize("weight_format", [*FORMATS, pytest.param("bnb-nf4", marks=BITSANDBYTES)])
@pytest.mark.parametrize(("alpha", "of_input"), [(16.0, True), (16.0, False), (4.0, True)])
def test_output_and_gradients_are_pefts(weight_format, alpha, of_input):
    peft, ours = pair(weight_format, alpha=alpha)
    assert_same(run(ours, of_input=of_input), run(peft, of_input=of_input))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("lokr", LOKR)
def test_lokr_is_pefts(weight_format, lokr, of_input):
    peft, ours = pair(weight_format, alpha=5.0, lokr=lokr)
    assert_same(run(ours, of_input=of_input), run(peft, of_input=of_input))


@BITSANDBYTES
@pytest.mark.parametrize("lokr", LOKR)
def test_lokr_adds_to_packed_weights(lokr):
    """Where peft takes the shape of packed weights for the layer's."""
    x, pair_of = torch.ones(3, 64), (pair(form, lokr=lokr)[1] for form in ("bnb-nf4", "none"))
    found, expected = ([(model(x) - model[0].base_layer(x)).detach()] for model in pair_of)
    assert_same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("lokr", [None, *LOKR])
def test_bf16_is_as_exact_as_pefts(lokr):
    exact = run(pair(dtype=torch.float32, lokr=lokr)[0])
    peft, ours = (run(model) for model in pair(dtype=torch.bfloat16, lokr=lokr))
    for one, other, truth in zip(ours, peft, exact, strict=True):
        assert (one.float() - truth).norm() <= 1.2 * (other.float() - truth).norm() + 1e-6


def test_dropout_draws_the_same_mask():
    peft, ours = pair(dropout=0.5)
    assert_same(run(ours), run(peft))
    ours.eval(), peft.eval()
    assert_same(run(ours), run(peft))


def test_several_adapters_go_pefts_way():
    models = pair()
    second = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    for model in models:
        torch.manual_seed(3)
        inject_adapter_in_model(second, model, adapter_name="second")
    changes = [
        lambda layer: layer.set_adapter(["default", "second"]),
        lambda layer: layer.set_adapter("second"),
        lambda layer: layer.enable_adapters(False),
        lambda layer: (layer.enable_adapters(True), layer.set_adapter("default"), layer.merge()),
    ]
    for change in changes:
        for model in models:
            change(model[0])
        ours, theirs = ([model(torch.ones(3, 64)).detach()] for model in models[::-1])
        assert_same(ours, theirs)


def test_recomputed_gradients_accumulate():
    peft, ours = pair()
    for model in (peft, ours):
        for seed in (1, 2):
            torch.manual_seed(seed)
            x = torch.randn(2, 64, requires_grad=True)
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sin().sum().backward()
    trained = ([p for p in each.parameters() if p.requires_grad] for each in (ours, peft))
    assert_same(*([p.grad for p in each] for each in trained))
