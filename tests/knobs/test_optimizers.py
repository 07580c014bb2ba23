"""Optimizers: what they hold is predicted, runs go on to the bit, no plan's code runs unasked."""

import json

import pytest
import torch
from torch import nn

from autotune.errors import InvalidInput
from autotune.knobs import settings
from autotune.knobs.settings import ALLOWED, optimizer_bytes
from autotune.plan.workload import ADAMW, OptimizerChoice
from autotune.train.optimizer import AdapterOptimizer

SHAPES = ((4, 1200), (1200, 4), (8, 8))
CHOICES = [
    *(pytest.param(OptimizerChoice(name=name), id=name) for name in settings.OPTIMIZERS),
    pytest.param(OptimizerChoice(name="prodigy", options=(("slice_p", 11),)), id="sliced prodigy"),
    pytest.param(
        OptimizerChoice(name="torch.optim:RMSprop", options=(("momentum", 0.9),)), id="class"
    ),
]


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv(ALLOWED, "torch.optim:RMSprop")


def fresh(choice):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    rate = 1.0 if choice.name == "prodigy" else 1e-2
    return AdapterOptimizer(
        parameters, learning_rate=rate, weight_decay=0.1, max_grad_norm=1.0, choice=choice
    )


def take_steps(optimizer, numbers):
    for number in numbers:
        for parameter in optimizer.parameters:
            parameter.grad = parameter.detach().sin() * number
        optimizer.step()


@pytest.mark.parametrize("choice", CHOICES)
def test_runs_resume_as_predicted(choice):
    whole, first, second = fresh(choice), fresh(choice), fresh(choice)
    take_steps(whole, range(1, 7))
    take_steps(first, range(1, 4))
    with first.averaged():  # previews change nothing
        pass
    numbers = json.loads(json.dumps(first.numbers()))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()}, numbers)
    take_steps(second, range(4, 7))
    assert whole.state().keys() == second.state().keys()
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in whole.state().items())
    assert whole.numbers() == second.numbers()
    assert not torch.equal(whole.masters[0], fresh(choice).masters[0])
    live = (each.untyped_storage() for each in whole.live_tensors(torch.nn.Module()))
    storages = {storage.data_ptr(): storage.nbytes() for storage in live}
    masters = sum(master.nbytes for master in whole.masters)
    assert optimizer_bytes(choice, dict.fromkeys(SHAPES, 1))[0] == sum(storages.values()) - masters


def test_shared_tables_count_once():
    choice = OptimizerChoice(name="adamw-8bit")
    one, many = (optimizer_bytes(choice, {(4, 1200): count})[0] for count in (1, 101))
    assert (many - one) / 100 == 2 * 4800 + 2 * 4 * -(-4800 // 256)
    assert optimizer_bytes(ADAMW, {(4, 1200): 100}) == (100 * (8 * 4800 + 4), 0)


def test_schedule_free_saves_its_average():
    optimizer = fresh(OptimizerChoice(name="schedule-free"))
    take_steps(optimizer, range(1, 5))
    learning = [master.detach().clone() for master in optimizer.masters]
    with optimizer.averaged():
        average = [master.detach().clone() for master in optimizer.masters]
    assert all(torch.equal(*pair) for pair in zip(learning, optimizer.masters, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(learning, average, strict=True))
    optimizer.turn_to_average()
    assert all(torch.equal(*pair) for pair in zip(average, optimizer.masters, strict=True))


def test_infinite_gradients_change_nothing():
    optimizer = fresh(OptimizerChoice(name="lion"))
    before = [master.detach().clone() for master in optimizer.masters]
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, torch.inf)
    assert not optimizer.step().isfinite()
    assert all(torch.equal(*pair) for pair in zip(before, optimizer.masters, strict=True))


def test_plans_load_no_code(monkeypatch):
    choice = OptimizerChoice(name="antigravity:Optimizer")
    with pytest.raises(InvalidInput, match="needs your consent") as caught:
        settings.check_options(choice)
    assert "--optimizer antigravity:Optimizer" in caught.value.hint
    assert "antigravity" not in __import__("sys").modules
    monkeypatch.setenv(ALLOWED, "")
    settings.allow_optimizer("torch.optim:SGD")
    assert settings.optimizer_class("torch.optim:SGD") is torch.optim.SGD
