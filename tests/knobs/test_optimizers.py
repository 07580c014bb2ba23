"""Optimizers by name and class: what they hold is predicted, runs go on to the bit, no plan's
code runs unasked.
"""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.api.options import choose_optimizer
from autotune.backends import entries, load_entry_points
from autotune.cli.options import named_values
from autotune.errors import InvalidInput
from autotune.knobs import allow_optimizer, check_options, optimizer_bytes, optimizer_class
from autotune.knobs.optimizer import ALLOWED, OPTIMIZERS
from autotune.runtime import process
from autotune.schema import ADAMW, OptimizerChoice
from autotune.training.optimizer import AdapterOptimizer

SHAPES = ((4, 1200), (1200, 4), (8, 8))
CHOICES = [
    *(pytest.param(OptimizerChoice(name=name), id=name) for name in OPTIMIZERS),
    pytest.param(OptimizerChoice(name="prodigy", options=(("slice_p", 11),)), id="sliced prodigy"),
    pytest.param(
        OptimizerChoice(name="torch.optim:RMSprop", options=(("momentum", 0.9),)), id="class"
    ),
]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "torch.optim:RMSprop")


def fresh(choice: OptimizerChoice) -> AdapterOptimizer:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    rate = 1.0 if choice.name == "prodigy" else 1e-2
    return AdapterOptimizer(
        parameters, learning_rate=rate, weight_decay=0.1, max_grad_norm=1.0, choice=choice
    )


def take_steps(optimizer: AdapterOptimizer, numbers: range) -> None:
    for number in numbers:
        for parameter in optimizer.parameters:
            parameter.grad = parameter.detach().sin() * number
        optimizer.step()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_goes_on_to_the_bit_and_holds_what_is_predicted(choice: OptimizerChoice) -> None:
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
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in whole.live_tensors()
    }
    masters = sum(master.nbytes for master in whole.masters)
    assert optimizer_bytes(choice, dict.fromkeys(SHAPES, 1))[0] == sum(storages.values()) - masters


def test_state_of_many_parameters_counts_a_shared_table_once() -> None:
    choice = OptimizerChoice(name="adamw-8bit")
    one, many = (optimizer_bytes(choice, {(4, 1200): count})[0] for count in (1, 101))
    assert (many - one) / 100 == 2 * 4800 + 2 * 4 * -(-4800 // 256)
    assert optimizer_bytes(ADAMW, {(4, 1200): 100}) == (100 * (8 * 4800 + 4), 0)


def test_saved_and_shown_is_the_average_of_schedule_free() -> None:
    optimizer = fresh(OptimizerChoice(name="schedule-free"))
    take_steps(optimizer, range(1, 5))
    learning = [master.detach().clone() for master in optimizer.masters]
    with optimizer.averaged():
        average = [master.detach().clone() for master in optimizer.masters]
    assert all(torch.equal(*pair) for pair in zip(learning, optimizer.masters, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(learning, average, strict=True))
    optimizer.turn_to_average()
    assert all(torch.equal(*pair) for pair in zip(average, optimizer.masters, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    optimizer = fresh(OptimizerChoice(name="lion"))
    before = [master.detach().clone() for master in optimizer.masters]
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, torch.inf)
    assert not optimizer.step().isfinite()
    assert all(torch.equal(*pair) for pair in zip(before, optimizer.masters, strict=True))


def test_code_that_only_a_plan_names_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = OptimizerChoice(name="antigravity:Optimizer")
    with pytest.raises(InvalidInput, match="takes your consent") as caught:
        check_options(choice)
    assert "--optimizer antigravity:Optimizer" in caught.value.hint
    assert "antigravity" not in __import__("sys").modules
    monkeypatch.setenv(ALLOWED, "")
    choose_optimizer(ADAMW, "torch.optim:SGD", None)
    assert optimizer_class("torch.optim:SGD") is torch.optim.SGD


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("adamv", {}, "no optimizer called"),
        ("lion", {"beta": 0.9}, "takes no 'beta'"),
        ("lion", {"lr": 0.9}, "lr is not an option"),
        ("torch.nn:Linear", {}, "no torch.optim.Optimizer"),
        ("torch.optim:Nothing", {}, "has no Nothing"),
        ("no_such_package:Sgd", {}, "needs no_such_package"),
        ("os; rm", {}, "not an optimizer with such options"),
    ],
)
def test_what_is_wrong_is_said(name: str, options: dict[str, float], what: str) -> None:
    allow_optimizer(name.replace("\0", ""))
    with pytest.raises(InvalidInput, match=what):
        check_options(choose_optimizer(ADAMW, name, options or None))


@pytest.mark.parametrize(
    "line", ["import torch; torch.nothing", "1 / 0", "raise RuntimeError('no such device')"]
)
def test_a_package_that_fails_as_it_is_imported_is_named_with_its_error(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brittle_optimizers.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    allow_optimizer("brittle_optimizers:Mine")
    with pytest.raises(InvalidInput, match=r"brittle_optimizers cannot be imported: .*Error: "):
        optimizer_class("brittle_optimizers:Mine")


def test_options_are_read_as_python_writes_them() -> None:
    read = named_values(["betas=(0.9, 1)", "eps=1e-6", "nesterov=true", "mode=fast"])
    assert read == {"betas": (0.9, 1.0), "eps": 1e-6, "nesterov": True, "mode": "fast"}


def test_what_predictions_do_not_need_is_there_for_code_that_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "acme_optimizers.py").write_text("from torch.optim import SGD as Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "UNNEEDED", ("acme_optimizers",))
    monkeypatch.setenv(ALLOWED, "acme_optimizers:Own")
    point = EntryPoint("own", "acme_optimizers:Own", "acme")
    monkeypatch.setattr(entries, "entry_points", lambda group: [point])
    found: list[type] = []
    for look in (
        lambda: found.append(optimizer_class("acme_optimizers:Own")),
        lambda: load_entry_points("acme", found.append),
    ):
        monkeypatch.setitem(
            sys.modules, "acme_optimizers", None
        )  # as `prepare_process(only_predicts=True)` leaves it
        look()
    assert found == [torch.optim.SGD] * 2
