"""The loss on held-out images: what it is, that it changes nothing that is learned, and what it
is used for."""

import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.events import StepFinished
from autotune.report.run import validation_lines
from autotune.train import validation
from autotune.train.folder import ADAPTER_FILE, read_report
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import read_metrics
from autotune.train.monitor import MIN_SPIKE_STEPS, Monitor
from autotune.train.run import train
from autotune.train.step import Noising
from autotune.train.validation import HeldOutLoss
from autotune.weights.adapters import read_adapter
from autotune.weights.tensors import load_file
from tests.events import steps_to
from tests.train.conftest import CPU, Bench
from tests.train.test_modulation import AHEAD, family_bench, loop_of  # noqa: F401
from tests.train.test_resume import same

STEPS, DRAWS = 5, 6


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For time's sake."""
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", DRAWS)


def test_without_the_adapter_means_an_adapter_of_zero(bench: Bench) -> None:
    """As it starts, and whatever is in it later; then it trains on."""
    loop = bench.loop(
        bench.plan(num_steps=2, validation="40%"), Path(tempfile.mkdtemp()), held_out=2
    )
    meter = loop.validation.meter
    assert meter
    assert loop.validation.history
    trained, base = meter.measure(2), meter.measure_base(2)
    assert loop.validation.history.base_loss == statistics.fmean(base)
    for parameter, value in zip(bench.trained.adapter, bench.initial, strict=True):
        parameter.data.copy_(value)
    assert meter.measure(2) == base != trained
    assert all(parameter.requires_grad for parameter in bench.trained.adapter)
    assert len(base) == DRAWS
    assert meter.measure(1) == pytest.approx(base, rel=1e-5), "the micro-batch changes nothing"


def test_levels_are_spread_over_all_that_training_draws(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", 32)
    noising = Noising(shift=2.2)
    meter = HeldOutLoss(bench.trained, bench.encoded, noising, lambda batch: batch)
    levels = sorted(draw.level for draw in meter._draws)
    drawn = torch.tensor([noising.level_at(step, 0, ()) for step in range(4000)]).sort().values
    quantiles = (torch.arange(len(levels)) + 0.5) / len(levels)
    assert levels == pytest.approx(drawn.quantile(quantiles).tolist(), abs=0.02)
    assert len({draw.number for draw in meter._draws}) == len(levels), "each has noise of its own"
    assert all(
        any(draw.index == item for draw in meter._draws) for item in range(len(bench.encoded.items))
    )


def test_validation_changes_nothing_that_is_learned(bench: Bench, tmp_path: Path) -> None:
    plain = bench.loop(bench.plan(num_steps=4, caption_dropout=0.1), tmp_path / "plain", held_out=2)
    job: dict[str, Any] = {
        "num_steps": 4,
        "caption_dropout": 0.1,
        "validation": "40%",
        "validation_every": 1,
    }
    assert same(
        bench.loop(bench.plan(**job, keep_best=True), tmp_path / "validated", held_out=2), plain
    )


@pytest.mark.slow
def test_any_row_of_kills_ends_with_the_same_bits_and_the_same_measurements(
    bench: Bench, tmp_path: Path
) -> None:
    job: dict[str, Any] = {
        "num_steps": STEPS,
        "validation": "40%",
        "validation_every": 2,
        "keep_best": True,
    }
    whole = bench.loop(bench.plan(**job, checkpointing_steps=1), tmp_path / "whole", held_out=2)
    expected = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [event.step for event in expected if event.validation_loss is not None] == [2, 4, 5]

    @settings(max_examples=4)
    @given(kills=st.lists(st.integers(1, STEPS), min_size=1, max_size=2), every=st.integers(1, 3))
    def check(kills: list[int], every: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            plan = bench.plan(**job, checkpointing_steps=every)
            for kill in kills:
                bench.loop(plan, Path(name), kill_after=kill, held_out=2)
            ended = bench.loop(plan, Path(name), held_out=2)
            assert same(ended, whole)
            assert ended.validation.history == whole.validation.history
            assert ended.monitor.gradient_state() == whole.monitor.gradient_state()
            measured = [
                (e.validation_loss, e.gradient_spikes)
                for e in read_metrics(Path(name) / "metrics.jsonl")
            ]
            assert measured == [(e.validation_loss, e.gradient_spikes) for e in expected]
            best = load_file(Path(name) / "checkpoints" / "best.safetensors")[0]
            assert all(
                torch.equal(value, best[key])
                for key, value in load_file(
                    tmp_path / "whole" / "checkpoints" / "best.safetensors"
                )[0].items()
            )

    check()


def test_without_memory_for_it_a_run_goes_on_and_takes_no_step_twice(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = HeldOutLoss._losses

    def run_out(meter: HeldOutLoss, draws: Any) -> list[float]:
        if any(
            bool(parameter.any()) for parameter in bench.trained.adapter[1::2]
        ):  # not without an adapter
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(meter, draws)

    monkeypatch.setattr(HeldOutLoss, "_losses", run_out)
    seen: list[StepFinished] = []
    plan = bench.plan(num_steps=4, validation="40%", validation_every=2)
    loop = bench.loop(plan, tmp_path, on_step=seen.append, held_out=2)
    assert [event.step for event in seen] == [1, 2, 3, 4]
    assert all(event.validation_loss is None for event in seen)
    assert loop.warnings == [
        "memory is too short to measure the loss on held-out images; the run goes on without"
    ]
    assert loop.validation.result(4) is None


@pytest.mark.quick("adapter")
@pytest.mark.parametrize("broken", ["base", "adapter"])
def test_losses_that_are_not_finite_are_unknown_and_the_run_is_reported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    measure, calls = HeldOutLoss.measure, [0]

    def spoiled(meter: HeldOutLoss, micro_batch_size: int) -> list[float]:
        calls[0] += 1
        losses = measure(meter, micro_batch_size)
        return (
            [math.nan, *losses[1:]]
            if calls[0] in ((1,) if broken == "base" else (3, 4))
            else losses
        )

    monkeypatch.setattr(HeldOutLoss, "measure", spoiled)
    monkeypatch.setattr(TrainingLoop, "evaluate", lambda loop: math.inf)
    seen: list[StepFinished] = []
    plan = bench.plan(num_steps=3, validation="40%", validation_every=1, output=str(tmp_path))
    report = train(plan, bench.hardware, bench.cache, steps_to(seen.append))
    assert read_report(tmp_path) == report
    known = [event.validation_loss is not None for event in seen]
    told = [
        warning
        for warning in report.warnings
        if warning.startswith("the loss on held-out images is not finite")
    ]
    assert len(told) == 1
    if broken == "base":
        assert not any(known)
        assert report.validation is None
    else:
        assert known == [True, False, False]
        assert report.validation
        assert report.validation.lowest_step == 1
        assert report.validation.final_loss is None
        assert "not finite after the last step" in validation_lines(report.validation)[0]
    assert report.verdict
    assert report.verdict.adapter_loss is None


@pytest.mark.quick("qwen-image")
def test_modulations_computed_ahead_give_the_same_losses(family_bench: Bench) -> None:
    found = []
    for settings_ in (AHEAD, AHEAD.changed(modulation="resident")):
        loop = loop_of(family_bench, family_bench.plan(settings=settings_))
        meter = HeldOutLoss(loop.model, family_bench.encoded, loop.noising, loop._to_device)
        found.append(meter.measure(2))
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_the_best_adapter_is_kept(bench: Bench, tmp_path: Path) -> None:
    """At a rate at which the first steps help and later ones do not."""
    job: dict[str, Any] = {
        "num_steps": 6,
        "validation": "40%",
        "validation_every": 1,
        "learning_rate": 0.3,
    }
    steps: list[StepFinished] = []
    plan = bench.plan(**job, keep_best=True, output=str(tmp_path))
    report = train(plan, bench.hardware, bench.cache, steps_to(steps.append))
    best = report.validation
    assert best
    assert best.num_images == 2
    losses = {event.step: event.validation_loss or math.inf for event in steps}
    assert best.kept_step == best.lowest_step == min(losses, key=lambda step: losses[step]) < 6
    assert best.lowest_loss == losses[best.kept_step]
    kept = read_adapter(tmp_path / ADAPTER_FILE)
    assert kept.info.training_steps == best.kept_step
    last = load_file(next(iter((tmp_path / "checkpoints").glob("checkpoint-*6.safetensors"))))[0]
    pair = next(iter(kept.layers.values()))
    assert not any(torch.equal(pair.up, tensor) for tensor in last.values())
    stored = load_file(tmp_path / "checkpoints" / "best.safetensors")[0]
    assert any(torch.equal(pair.up, tensor) for tensor in stored.values())
    assert "validation" in [phase.name for phase in report.phases]


def test_spikes_of_the_gradient_are_counted() -> None:
    monitor = Monitor(CPU)
    for _ in range(MIN_SPIKE_STEPS - 1):
        monitor.add_gradient(1.0)
    monitor.add_gradient(50.0)  # too early to tell
    assert monitor.num_spikes == 0
    monitor.add_gradient(9.0)
    monitor.add_gradient(11.0)
    assert monitor.num_spikes == 1
    again = Monitor(CPU)
    again.load_gradient_state(json.loads(json.dumps(monitor.gradient_state())))
    again.add_gradient(11.0)
    assert again.num_spikes == 2
