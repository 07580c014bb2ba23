"""The step learns the same for any split into micro-batches; draws depend on their place."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import Noising, optimizer_step
from tests.train.test_loop import adamw


class Scaled:
    """Stands for a family: a linear model on latents alone."""

    def predict(self, transformer, noisy, sigmas, batch):
        return transformer(noisy.flatten(2).mT).mT.view(noisy.shape)


LATENTS = torch.randn(4, 3, 1, 2, 2, generator=torch.Generator().manual_seed(0))


def _run(sizes, dtype=torch.float32, steps=2):
    torch.manual_seed(0)
    model = nn.Linear(3, 3).to(dtype)
    rates = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    optimizer = AdapterOptimizer(list(model.parameters()), **rates)
    outcomes = []
    for step in range(steps):
        batches = [{"latents": part.to(dtype)} for part in LATENTS.split(list(sizes))]
        how = {"effective_batch_size": 4, "noising": Noising(7, 2.0), "step": step}
        outcomes.append(optimizer_step(Scaled(), model, optimizer, batches, **how))
    return model, outcomes


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_any_split_of_batch_learns_same(sizes):
    whole, first = _run((4,))
    split, second = _run(sizes)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for one, other in zip(first, second, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


def test_a_step_equals_one_written_out():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    expected = copy.deepcopy(model)
    draws = [Noising(7, 2.0).draw(0, place, LATENTS.shape[1:]) for place in range(4)]
    loss = 0.0
    for clean, (noise, sigma) in zip(LATENTS, draws, strict=True):
        noisy = (1 - sigma) * clean + sigma * noise
        predicted = torch.einsum("oc,cthw->othw", expected.weight, noisy)
        predicted = predicted + expected.bias.view(3, 1, 1, 1)
        loss = loss + ((predicted - (noise - clean)) ** 2).mean() / 4
    loss.backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1).step()
    stepped, (outcome,) = _run((4,), steps=1)
    assert outcome.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for one, other in zip(stepped.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bf16_parameters_keep_small_updates():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = adamw(parameter, learning_rate=1e-4, max_grad_norm=1e9)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.detach()) == pytest.approx(0.99, abs=0.004)


@given(st.integers(0, 2**31), st.integers(0, 10_000), st.integers(0, 64), st.floats(0.1, 10))
@settings(max_examples=50)
def test_draws_depend_on_their_place(seed, step, place, shift):
    noise, sigma = Noising(seed, shift).draw(step, place, (3, 1, 2, 2))
    again, same = Noising(seed, shift).draw(step, place, (3, 1, 2, 2))
    assert torch.equal(noise, again)
    assert sigma == same
    assert 0 < sigma < 1
    assert not torch.equal(noise, Noising(seed, shift).draw(step, place + 1, (3, 1, 2, 2))[0])
