"""The loss on held-out images: what it is, what it leaves alone, and what it is used for."""

import math
import statistics

import pytest
import torch

from autotune.train import validation, workload
from autotune.train.folder import ADAPTER_FILE
from autotune.train.step import Noising
from autotune.train.validation import HeldOutLoss
from autotune.weights.adapters import read_adapter
from autotune.weights.tensors import load_file
from tests.events import steps_to
from tests.train.test_modulation import AHEAD, family_bench, loop_of  # noqa: F401
from tests.train.test_resume import same

DRAWS = 6


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", DRAWS)


def test_without_adapter_means_adapter_of_zero(bench, tmp_path):
    loop = bench.loop(bench.plan(num_steps=2, validation="40%"), tmp_path, held_out=2)
    meter = loop.validation.meter
    trained, base = meter.measure(2), meter.measure_base(2)
    assert loop.validation.history.base_loss == statistics.fmean(base)
    for parameter, value in zip(bench.trained.adapter, bench.initial, strict=True):
        parameter.data.copy_(value)
    assert meter.measure(2) == base != trained
    assert all(parameter.requires_grad for parameter in bench.trained.adapter)
    assert len(base) == DRAWS
    assert meter.measure(1) == pytest.approx(base, rel=1e-5), "the micro-batch changes nothing"


def test_levels_are_spread_evenly(bench, monkeypatch):
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", 32)
    noising = Noising(shift=2.2)
    draws = HeldOutLoss(bench.trained, bench.encoded, noising, lambda batch: batch)._draws
    levels = sorted(draw.level for draw in draws)
    drawn = torch.tensor([noising.level_at(step, 0, ()) for step in range(4000)]).sort().values
    quantiles = (torch.arange(len(levels)) + 0.5) / len(levels)
    assert levels == pytest.approx(drawn.quantile(quantiles).tolist(), abs=0.02)
    assert len({draw.number for draw in draws}) == len(levels), "each has noise of its own"
    assert {draw.item for draw in draws} == set(range(len(bench.encoded.items)))


def test_validation_changes_nothing_that_is_learned(bench, tmp_path):
    job = {"num_steps": 3, "caption_dropout": 0.1}
    plain = bench.loop(bench.plan(**job), tmp_path / "plain", held_out=2)
    job |= {"validation": "40%", "validation_every": 1, "keep_best": True}
    assert same(bench.loop(bench.plan(**job), tmp_path / "validated", held_out=2), plain)


def test_a_run_goes_on_without(bench, tmp_path, monkeypatch):
    measure = HeldOutLoss._losses

    def run_out(meter, draws):
        if any(bool(parameter.any()) for parameter in bench.trained.adapter[1::2]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(meter, draws)

    monkeypatch.setattr(HeldOutLoss, "_losses", run_out)
    seen = []
    plan = bench.plan(num_steps=3, validation="40%", validation_every=2)
    loop = bench.loop(plan, tmp_path, on_step=seen.append, held_out=2)
    assert [(event.step, event.validation_loss) for event in seen] == [(n, None) for n in (1, 2, 3)]
    (warning,) = loop.warnings
    assert warning.startswith("memory is too short to measure the loss on held-out images")
    assert loop.validation.result(3) is None


def test_nan_losses_are_unknown(bench, tmp_path, monkeypatch):
    measure, calls = HeldOutLoss.measure, iter(range(9))

    def spoiled(meter, size):
        losses = measure(meter, size)
        return [math.nan, *losses[1:]] if next(calls) > 1 else losses

    monkeypatch.setattr(HeldOutLoss, "measure", spoiled)
    seen = []
    plan = bench.plan(num_steps=3, validation="40%", validation_every=1, output=str(tmp_path))
    report = bench.train(plan, steps_to(seen.append))
    assert [event.validation_loss is not None for event in seen] == [True, False, False]
    assert (report.validation.lowest_step, report.validation.final_loss) == (1, None)
    assert sum("held-out images is not finite" in warning for warning in report.warnings) == 1


@pytest.mark.quick("qwen-image")
def test_modulations_computed_ahead_give_same_losses(family_bench):
    found = []
    for modulation in ("ahead", "resident"):
        plan = family_bench.plan(settings=AHEAD.changed(modulation=modulation))
        loop = loop_of(family_bench, plan)
        meter = HeldOutLoss(loop.model, family_bench.encoded, loop.noising, loop._to_device)
        found.append(meter.measure(2))
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_the_best_adapter_is_kept(bench, tmp_path, monkeypatch):
    """At a rate at which the first steps help and later ones do not."""
    monkeypatch.setattr(workload, "SANE_RATES", 1e4)
    job = {"num_steps": 6, "validation": "40%", "validation_every": 1}
    plan = bench.plan(**job, learning_rate=0.3, keep_best=True, output=str(tmp_path))
    steps = []
    report = bench.train(plan, steps_to(steps.append))
    best = report.validation
    assert best.num_images == 2
    losses = {event.step: event.validation_loss or math.inf for event in steps}
    assert best.kept_step == best.lowest_step == min(losses, key=lambda step: losses[step]) < 6
    assert best.lowest_loss == losses[best.kept_step]
    kept = read_adapter(tmp_path / ADAPTER_FILE)
    assert kept.info.training_steps == best.kept_step
    pair = next(iter(kept.layers.values()))
    for name, is_kept in (("best", True), ("checkpoint-000006", False)):
        stored = load_file(tmp_path / "checkpoints" / f"{name}.safetensors")[0]
        assert any(torch.equal(pair.up, tensor) for tensor in stored.values()) == is_kept
    assert "validation" in [phase.name for phase in report.phases]
