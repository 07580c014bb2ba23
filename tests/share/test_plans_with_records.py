"""Planning with records: fewer trials where they are true, the same answer where they are not,
never an unsafe one."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from autotune.cost.predict import CostModel
from autotune.events import Event, Notice, RecordsMatched
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import PlanRequest
from autotune.search.planner import make_plan
from autotune.search.problem import PlannerBackend, PlanningProblem
from autotune.share.record import Record, build_record
from autotune.share.store import Store
from autotune.share.warm_start import MAX_RESIDUALS, find_matches
from autotune.system.version import __version__
from tests import builders
from tests.builders import GIB, trial
from tests.search.formula import by_formula
from tests.search.machines import request, surroundings
from tests.share.examples import machine, rate

QUESTION = request()
CAPABILITIES = (
    "attention.native",
    "attention._native_cudnn",
    "precision.bf16",
    "quantization.torchao-int8",
)
RATES = (
    rate("memory.bandwidth", 3e12), rate("matmul.bf16.4096x3072x3072", 6e14),
    *builders.attention_rates(CAPABILITIES)
)  # fmt: skip
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "compute_capability": (9, 0), "total_memory_bytes": 80 * GIB,
    "budget_bytes": 78 * GIB, "power_limit_watts": 700.0, "rates": RATES,
}  # fmt: skip


def gpu(**changes: object) -> HardwareProfile:
    """An H100 on which everything that trains is open."""
    capabilities = tuple(
        machine().capabilities[0].model_copy(update={"name": name}) for name in CAPABILITIES
    )
    return machine(**{**H100, "capabilities": capabilities, **changes})


@cache
def case_on_gpu() -> PlanningProblem:
    return PlanningProblem.build(QUESTION, gpu(), surroundings())


@dataclass
class Simulated:
    """A machine whose every trial is decided beforehand. `slow`: factors of its choices; `seed`:
    of its noise."""

    hardware: HardwareProfile = field(default_factory=gpu)
    slow: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    tried: list[Candidate] = field(default_factory=list)

    @property
    def cost(self) -> CostModel:
        return case_on_gpu().cost.for_hardware(self.hardware)

    def run(self, candidate: Candidate) -> TrialResult:
        self.tried.append(candidate)
        predicted = self.cost.predict_uncalibrated(candidate)
        rng = random.Random(f"{candidate} {self.seed}")
        factor = math.prod(self.slow.get(str(choice), 1.0) for _, choice in candidate)
        seconds = predicted.step_seconds * 1.2 * factor * rng.gauss(1, 0.01)
        fits = predicted.run_memory_bytes <= self.hardware.device.budget_bytes
        return trial(
            candidate,
            seconds if fits else None,
            int(predicted.allocated_memory_bytes * 1.01),
            wall_seconds=9,
        )

    def backend(self, *stores: Store) -> PlannerBackend:
        return replace(
            surroundings(self.run),
            find_matches=lambda *problem: find_matches(*problem, stores),
            autotune_version=__version__,
        )

    @property
    def best_seconds(self) -> float:
        silent = replace(self, tried=[])
        results = [silent.run(candidate) for candidate in case_on_gpu().space.candidates]
        return min(r.median_step_seconds or math.inf for r in results)


@dataclass(frozen=True)
class Planned:
    """A plan with what was told while it was made."""

    plan: TrainingPlan
    record: Record
    doubts: tuple[str, ...]
    match: str | None

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        return self.plan.frozen.trials


def planned_on(simulated: Simulated, *stores: Store, asked: PlanRequest = QUESTION) -> Planned:
    told: list[Event] = []
    made = make_plan(asked, simulated.hardware, told.append, simulated.backend(*stores))
    record = build_record(made.plan, simulated.hardware, made.residuals).changed(
        measured_on=date(2026, 3, 1)
    )
    notices = (event for event in told if isinstance(event, Notice))
    doubts = tuple(event.text for event in notices if event.topic == "records")
    kinds = (event.kind for event in told if isinstance(event, RecordsMatched))
    return Planned(made.plan, record, doubts, next(kinds, None))


def store_with(folder: Path, records: Sequence[Record]) -> Store:
    store = Store(str(folder))
    store.add(*records)
    return store


SLOW = {"_native_cudnn": 0.8, "torchao-int8": 1.3}


@pytest.fixture(scope="module", autouse=True)
def _by_formula() -> Iterator[None]:
    with by_formula(num_blocks=12):
        yield


@pytest.fixture(scope="module")
def cold(_by_formula: None) -> Planned:
    return planned_on(Simulated(slow=SLOW))


def altered(record: Record, factor: float, memory: float = 1.0) -> Record:
    """The same with all times and peaks changed: what it promises follows from its trials."""
    trials = tuple(_changed(one, factor, memory) for one in record.trials)
    expected = record.expected.model_copy(
        update={
            "step_seconds": record.expected.step_seconds * factor,
            "images_per_second": record.expected.images_per_second / factor,
            "peak_memory_bytes": int(record.expected.peak_memory_bytes * memory),
        }
    )
    return Record.model_validate({**dict(record), "trials": trials, "expected": expected})


def _changed(one: TrialResult, factor: float, memory: float) -> TrialResult:
    peak = one.peak_memory_bytes and int(one.peak_memory_bytes * memory)
    steps = tuple(seconds * factor for seconds in one.step_seconds)
    return TrialResult.model_validate(
        {**dict(one), "step_seconds": steps, "peak_memory_bytes": peak}
    )


def test_an_exact_match_costs_exactly_one_trial(cold: Planned, tmp_path: Path) -> None:
    again = planned_on(Simulated(slow=SLOW, seed=1), store_with(tmp_path, [cold.record]))
    assert [t.candidate for t in again.trials] == [cold.plan.frozen.settings]
    assert again.plan.frozen.settings == cold.plan.frozen.settings
    assert again.plan.frozen.records == (cold.record.name,)
    assert again.doubts == ()
    assert any(
        "x the step time" in item.reason
        for reason in again.plan.frozen.reasons
        for item in reason.rejected
    )


def test_search_goes_on_when_the_record_no_longer_holds(cold: Planned, tmp_path: Path) -> None:
    upgraded = Simulated(gpu(driver="590.1"), SLOW | {"_native_cudnn": 1.6}, seed=1)
    again = planned_on(upgraded, store_with(tmp_path, [cold.record]))
    assert len(again.trials) > 1
    assert "does not hold here" in again.doubts[0]
    assert again.plan.frozen.settings.attention == "native"


UNFORESEEN = {"_native_cudnn": 1.4, "torchao-int8": 1.3}  # what the cost model likes best is slow


def neighbor(seed: int, slow: dict[str, float] = SLOW) -> Simulated:
    """Another card of the same generation: 0.7 of the rates, half of the power."""
    slower = tuple(rate(one.name, 0.7 * one.value) for one in RATES)
    return Simulated(
        gpu(name="NVIDIA H100 PCIe", rates=slower, power_limit_watts=350.0), slow, seed
    )


def test_a_neighbors_profile_saves_trials(tmp_path: Path) -> None:
    """By a search that time did not end."""
    asked = QUESTION.changed(search_seconds=600.0)
    record = planned_on(Simulated(slow=UNFORESEEN), asked=asked).record
    store = store_with(tmp_path, [record])
    machine = neighbor(1, UNFORESEEN)
    alone, helped = planned_on(machine, asked=asked), planned_on(machine, store, asked=asked)
    assert helped.plan.frozen.records == (record.name,)
    assert len(helped.trials) <= len(alone.trials)
    assert helped.plan.frozen.expected.step_seconds <= 1.05 * machine.best_seconds


def test_a_lie_that_could_be_true_is_found_by_one_trial_and_named(
    cold: Planned, tmp_path: Path
) -> None:
    poison = altered(cold.record, 0.6)
    again = planned_on(Simulated(slow=SLOW), store_with(tmp_path, [poison]))
    assert again.doubts == (
        f"{poison.name[:12]} does not hold here: it takes 1.67 times the recorded time",
    )
    assert again.plan.frozen.settings == cold.plan.frozen.settings
    assert again.plan.frozen.expected == cold.plan.frozen.expected
    assert len(again.trials) <= len(cold.trials) + 1


def test_a_record_makes_no_trial_of_what_is_predicted_not_to_fit(
    cold: Planned, tmp_path: Path
) -> None:
    small = gpu(budget_bytes=int(cold.plan.frozen.expected.peak_memory_bytes * 0.8))
    lowered = [
        residual and residual.model_copy(update={"memory": -0.4, "time": residual.time})
        for residual in cold.record.calibration
    ]
    poison = Record.model_validate(
        {**dict(altered(cold.record, 1, 0.7)), "calibration": tuple(lowered)}
    )
    with_poison = Simulated(small, SLOW)
    planned_on(with_poison, store_with(tmp_path, [poison]))
    cost = case_on_gpu().cost
    assert with_poison.tried
    for tried in with_poison.tried:
        assert cost.predict_uncalibrated(tried).run_memory_bytes <= 1.1 * small.device.budget_bytes


def test_settings_that_this_machine_does_not_admit_never_become_a_fallback(
    cold: Planned, tmp_path: Path
) -> None:
    winner = next(t for t in cold.record.trials if t.candidate == cold.plan.frozen.settings)
    smaller = _changed(winner, 1.05, 0.9)
    vanishing = smaller.model_copy(
        update={"candidate": winner.candidate.changed(attention="sage")}
    )  # no gradients
    poison = cold.record.changed(trials=(*cold.record.trials, vanishing), calibration=())
    again = planned_on(Simulated(slow=SLOW, seed=1), store_with(tmp_path, [poison]))
    assert again.plan.frozen.records == (poison.name,)
    assert len(again.trials) == 1
    assert "sage" not in {candidate.attention for candidate in again.plan.frozen.fallbacks}
    assert set(again.plan.frozen.fallbacks) <= set(case_on_gpu().space.candidates)


@pytest.mark.parametrize("limited", [{"pins": (("attention", "native"),)}, {"max_trials": 1}])
def test_what_a_limited_search_found_is_no_answer_to_the_whole_question(
    limited: dict[str, object], cold: Planned, tmp_path: Path
) -> None:
    before = planned_on(Simulated(slow=SLOW), asked=QUESTION.changed(**limited))
    again = planned_on(Simulated(slow=SLOW, seed=1), store_with(tmp_path, [before.record]))
    assert again.match == "near"
    assert len(again.trials) >= 4
    whole, found = cold.plan.frozen.settings, again.plan.frozen.settings
    # These machines are as fast without the levers, so that noise decides about them.
    assert found.changed(modulation=whole.modulation, norm_rope=whole.norm_rope) == whole


def test_strange_settings_correct_few_predictions(cold: Planned, tmp_path: Path) -> None:
    """Each of them would slow every prediction down."""
    first = cold.record.trials[0]
    strange = tuple(
        first.changed(candidate=first.candidate.changed(precision=f"p{i}", quantization=f"q{i}"))
        for i in range(300)
    )
    residual = next(one for one in cold.record.calibration if one)
    calibration = (*cold.record.calibration, *(residual for _ in strange))
    flood = cold.record.changed(trials=(*cold.record.trials, *strange), calibration=calibration)
    (match,) = find_matches(gpu(), flood.workload, stores=[store_with(tmp_path, [flood])]).records
    assert len(match.prior_residuals.residuals) == MAX_RESIDUALS
