"""Planning with records: fewer trials where they are true, else the same answer, and safe."""

import math
import random
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from itertools import count
from typing import NamedTuple

import pytest

from autotune.events import Notice
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import FrozenPart
from autotune.search.planner import make_plan
from autotune.search.problem import PlanningProblem
from autotune.share.store import Record, Store, build_record, shareable_trial
from autotune.share.warm_start import find_matches
from autotune.system.version import __version__
from tests import builders
from tests.builders import GIB, trial
from tests.events import events_of
from tests.search import machines
from tests.search.formula import by_formula
from tests.search.machines import request, surroundings
from tests.share.examples import machine, rate

QUESTION, NUMBERS = request(), count()
CAPABILITIES = (*machines.CAPABILITIES, "quantization.torchao-int8")
RATES = (
    rate("memory.bandwidth", 3e12),
    rate("matmul.bf16.4096x3072x3072", 6e14),
    *builders.attention_rates(CAPABILITIES),
)
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "compute_capability": (9, 0),
    "total_memory_bytes": 80 * GIB,
    "budget_bytes": 78 * GIB,
    "power_limit_watts": 700.0,
    "rates": RATES,
}


def gpu(**changes):
    one = machine().capabilities[0]
    capabilities = tuple(one.changed(name=name) for name in CAPABILITIES)
    return machine(**{**H100, "capabilities": capabilities, **changes})


@cache
def case_on_gpu():
    return PlanningProblem.build(QUESTION, gpu(), surroundings())


@dataclass
class Simulated:
    """A machine whose every trial is decided beforehand; `slow` are factors of its choices."""

    hardware: HardwareProfile = field(default_factory=gpu)
    slow: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    tried: list[Candidate] = field(default_factory=list)

    @property
    def cost(self):
        return replace(case_on_gpu().cost, hardware=self.hardware)  # a formula's

    def run(self, candidate):
        self.tried.append(candidate)
        predicted = self.cost.predict_uncalibrated(candidate)
        rng = random.Random(f"{candidate} {self.seed}")
        factor = math.prod(self.slow.get(str(choice), 1.0) for _, choice in candidate)
        seconds = predicted.step_seconds * 1.2 * factor * rng.gauss(1, 0.01)
        fits = predicted.run_memory_bytes <= self.hardware.device.budget_bytes
        peak = int(predicted.allocated_memory_bytes * 1.01)
        return trial(candidate, seconds if fits else None, peak, wall_seconds=9)

    def backend(self, store):
        return replace(
            surroundings(self.run),
            find_matches=lambda *problem: find_matches(*problem, store),
            autotune_version=__version__,
        )


class Planned(NamedTuple):
    plan: FrozenPart
    record: Record
    doubts: tuple[str, ...]


def planned_on(simulated, *records, asked=QUESTION):
    store, told = Store(f"memory://planned{next(NUMBERS)}"), list[Notice]()
    store.add(*records)
    listener, hardware = events_of(Notice, told.append), simulated.hardware
    made = make_plan(asked, hardware, listener, simulated.backend(store))
    doubts = tuple(notice.text for notice in told if notice.topic == "records")
    record = build_record(made.plan, hardware, made.residuals)
    return Planned(made.plan.frozen, record.changed(measured_on=date(2026, 3, 1)), doubts)


SLOW = {"_native_cudnn": 0.8, "torchao-int8": 1.3}


@pytest.fixture(scope="module", autouse=True)
def _by_formula():
    with by_formula(num_blocks=12):
        yield


@pytest.fixture(scope="module")
def cold(_by_formula):
    return planned_on(Simulated(slow=SLOW))


def altered(record, factor, memory=1.0):
    old = record.expected
    expected = old.changed(
        step_seconds=old.step_seconds * factor,
        images_per_second=old.images_per_second / factor,
        peak_memory_bytes=int(old.peak_memory_bytes * memory),
    )
    trials = tuple(_changed(one, factor, memory) for one in record.trials)
    return record.changed(trials=trials, expected=expected)


def _changed(one, factor, memory):
    peak = one.peak_memory_bytes and int(one.peak_memory_bytes * memory)
    steps = tuple(seconds * factor for seconds in one.step_seconds)
    return one.changed(step_seconds=steps, peak_memory_bytes=peak)


def test_exact_match_costs_exactly_one_trial(cold):
    near = cold.record.changed(conclusive=False)
    again = planned_on(Simulated(slow=SLOW, seed=1), cold.record, near)
    assert [t.candidate for t in again.plan.trials] == [cold.plan.settings]
    assert again.plan.settings == cold.plan.settings
    assert again.plan.records == (cold.record.name,)


UNFORESEEN = {"_native_cudnn": 1.4, "torchao-int8": 1.3}  # what the cost model likes best is slow


def test_sibling_records_save_trials():
    asked = QUESTION.changed(search_seconds=600.0)
    record = planned_on(Simulated(slow=UNFORESEEN), asked=asked).record
    rates = tuple(rate(one.name, 0.7 * one.value) for one in RATES)
    other = gpu(name="NVIDIA H100 PCIe", rates=rates, power_limit_watts=350.0)
    machine = Simulated(other, UNFORESEEN, seed=1)
    alone, helped = planned_on(machine, asked=asked), planned_on(machine, record, asked=asked)
    assert helped.plan.records == (record.name,)
    assert len(helped.plan.trials) <= len(alone.plan.trials)
    assert helped.plan.expected.step_seconds <= 1.05 * alone.plan.expected.step_seconds


def test_lies_are_found_and_named(cold):
    poison = altered(cold.record, 0.6)
    again = planned_on(Simulated(slow=SLOW), poison)
    assert again.doubts == (
        f"{poison.name[:12]} does not hold here: it takes 1.67 times the recorded time",
    )
    assert again.plan.settings == cold.plan.settings
    assert again.plan.expected == cold.plan.expected
    assert len(again.plan.trials) <= len(cold.plan.trials) + 1


def test_noisy_machines_may_differ_more(cold):
    slower = altered(cold.record, 0.85)
    noisy = slower.changed(machine=slower.machine.changed(noisy=True))
    assert planned_on(Simulated(slow=SLOW), slower).doubts
    assert not planned_on(Simulated(slow=SLOW), noisy).doubts


def test_records_try_nothing_too_large(cold):
    small = gpu(budget_bytes=int(cold.plan.expected.peak_memory_bytes * 0.8))
    lowered = [residual and residual.changed(memory=-0.4) for residual in cold.record.calibration]
    poison = altered(cold.record, 1, 0.7).changed(calibration=tuple(lowered))
    with_poison = Simulated(small, SLOW)
    planned_on(with_poison, poison)
    cost = case_on_gpu().cost
    assert with_poison.tried
    for tried in with_poison.tried:
        assert cost.predict_uncalibrated(tried).run_memory_bytes <= 1.1 * small.device.budget_bytes


def test_foreign_settings_are_no_fallback(cold):
    winner = next(t for t in cold.record.trials if t.candidate == cold.plan.settings)
    smaller = _changed(winner, 1.05, 0.9)
    no_gradients = winner.candidate.changed(attention="sage")
    vanishing = smaller.changed(candidate=no_gradients)
    poison = cold.record.changed(trials=(*cold.record.trials, vanishing), calibration=())
    again = planned_on(Simulated(slow=SLOW, seed=1), poison)
    assert again.plan.records == (poison.name,)
    assert len(again.plan.trials) == 1
    assert set(again.plan.fallbacks) <= set(case_on_gpu().space.candidates)


def claiming(record, machine, tried):
    """A record that claims more than its trials, of true times, show: the slowest has won."""
    trials = tuple(machine.run(candidate) for candidate in tried)
    ran = [one for one in trials if one.outcome == "ok"]
    worst = max(ran, key=lambda one: one.median_step_seconds or 0.0)
    seconds, peak = worst.median_step_seconds or 1.0, worst.peak_memory_bytes or 1
    expected = record.expected.changed(
        step_seconds=seconds, images_per_second=2 / seconds, peak_memory_bytes=peak
    )
    return record.changed(
        trials=tuple(map(shareable_trial, trials)),
        settings=worst.candidate,
        expected=expected,
        calibration=tuple(map(machine.cost.residual, trials)),
        conclusive=True,
    )


@pytest.mark.quick((9, 1))
@pytest.mark.parametrize("number", [1, 3, 9, 30])
@pytest.mark.parametrize("seed", range(3))
def test_true_records_never_slow_plans(cold, number, seed):
    rng, machine = random.Random(seed), Simulated(slow=(SLOW, UNFORESEEN, {})[seed])
    space = case_on_gpu().space
    alone = planned_on(machine).plan
    seconds = {c: machine.cost.predict_uncalibrated(c).step_seconds for c in space.candidates}
    slow = rng.sample(sorted(seconds, key=seconds.__getitem__)[len(seconds) // 2 :], number)
    helped = planned_on(machine, claiming(cold.record, machine, slow)).plan
    assert helped.expected.step_seconds <= 1.05 * alone.expected.step_seconds


LIES = {
    "the best is slow": lambda is_best, truth: truth.changed(time=0.7 if is_best else truth.time),
    "the best is large": lambda is_best, truth: truth.changed(memory=0.9 * is_best),
    "all is fast": lambda is_best, truth: truth.changed(time=-0.7),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("lie", LIES)
def test_lying_records_never_slow_plans(cold, lie, seed):
    rng, machine = random.Random(seed), Simulated(slow=(SLOW, UNFORESEEN, {})[seed % 3])
    alone = planned_on(machine).plan
    tried = rng.sample(case_on_gpu().space.candidates, 30)
    record = claiming(cold.record, machine, tried)
    best = alone.settings.attention, alone.settings.quantization
    told = (
        residual and LIES[lie]((t.candidate.attention, t.candidate.quantization) == best, residual)
        for t, residual in zip(record.trials, record.calibration, strict=True)
    )
    record = record.changed(calibration=tuple(told), conclusive=False)
    helped = planned_on(machine, record).plan
    assert helped.expected.step_seconds <= 1.05 * alone.expected.step_seconds
