"""An adapter with dropout: it acts in training steps alone, and no interruption or recomputation
changes its draws."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.models.adapter import find_dropout_layers
from autotune.plan.file import seal
from autotune.plan.plan import TrainingPlan
from autotune.train.loop import TrainingLoop
from autotune.train.model import eager_eval, load_model
from tests.train.conftest import CPU, Bench


@dataclasses.dataclass(frozen=True)
class DroppingBench(Bench):
    """Its plans say dropout."""

    def plan(self, **job: Any) -> TrainingPlan:
        plan = super().plan(**job)
        work = plan.frozen.workload.model_copy(update={"lora_dropout": 0.5})
        return seal(plan.job, plan.frozen.model_copy(update={"workload": work}))


@pytest.fixture(scope="module")
def dropping(bench: Bench) -> DroppingBench:
    fields = {field.name: getattr(bench, field.name) for field in dataclasses.fields(bench)}
    plan = DroppingBench(**fields).plan()
    trained = load_model(
        bench.resolved, plan.frozen.workload, plan.frozen.settings, CPU, plan.job.seed
    )
    return DroppingBench(**{**fields, "trained": trained})


def masters(loop: TrainingLoop) -> list[torch.Tensor]:
    return [master.detach().clone() for master in loop.optimizer.masters]


def test_it_changes_what_is_learned_and_never_what_is_evaluated(
    bench: Bench, dropping: DroppingBench, tmp_path: Path
) -> None:
    loop = dropping.loop(dropping.plan(num_steps=3), tmp_path / "dropping")
    plain = bench.loop(bench.plan(num_steps=3), tmp_path / "plain")
    assert not all(map(torch.equal, masters(loop), masters(plain)))
    for one, other in zip(bench.trained.adapter, dropping.trained.adapter, strict=True):
        one.data.copy_(other)
    assert loop.evaluate() != pytest.approx(plain.evaluate(), rel=1e-6)
    with eager_eval(dropping.trained.transformer):
        assert loop.evaluate() == pytest.approx(plain.evaluate(), rel=1e-6)
    assert find_dropout_layers(dropping.trained.transformer)


@pytest.mark.slow
def test_interruptions_and_recomputed_blocks_meet_the_same_draws(
    dropping: DroppingBench, tmp_path: Path
) -> None:
    from autotune.train.model import apply_settings

    plan = dropping.plan(num_steps=4, checkpointing_steps=1)
    whole = masters(dropping.loop(plan, tmp_path / "whole"))
    torch.rand(7)
    dropping.loop(plan, tmp_path / "cut", kill_after=3)
    resumed = masters(dropping.loop(plan, tmp_path / "cut"))
    try:
        apply_settings(
            dropping.trained, plan.frozen.settings.model_copy(update={"checkpointed_blocks": 3})
        )
        recomputed = masters(dropping.loop(plan, tmp_path / "recomputed"))
    finally:
        apply_settings(dropping.trained, plan.frozen.settings)
    assert all(map(torch.equal, whole, resumed))
    assert all(map(torch.equal, whole, recomputed))
