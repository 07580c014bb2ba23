"""Planning with records: fewer trials where they are true, the same answer where they are not,
never an unsafe one."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.plan.candidate import TrialResult
from autotune.share.record import Record
from autotune.share.warm_start import MAX_RESIDUALS, TIME_TOLERANCE, find_matches, find_mismatch
from tests.builders import GIB, candidate, trial
from tests.search.formula import by_formula
from tests.share.examples import rate
from tests.share.machines import (
    QUESTION,
    RATES,
    Planned,
    Simulated,
    case_on_gpu,
    gpu,
    planned_on,
    store_with,
)

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


def test_a_search_without_records_takes_several_trials_and_records_what_it_taught(
    cold: Planned,
) -> None:
    assert len(cold.trials) > 4
    assert cold.plan.frozen.records == ()
    ran = [t.outcome == "ok" for t in cold.record.trials]
    assert [residual is not None for residual in cold.record.calibration] == ran
    taught = [residual.time for residual in cold.record.calibration if residual]
    assert all(math.log(1.2 * 0.75) < value < math.log(1.2 * 1.4) for value in taught)


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


PROMISED = trial(candidate(), 1.8, 22 * GIB)


@pytest.mark.parametrize(
    ("local", "why"),
    [
        (trial(candidate(), 1.9, 22 * GIB), None),
        (trial(candidate(), 1.8, int(22.5 * GIB)), None),
        (trial(candidate(), 2.1, 22 * GIB), "1.17 times the recorded time"),
        (trial(candidate(), 1.0, 22 * GIB), "0.56 times the recorded time"),
        (trial(candidate(), 1.8, 23 * GIB), "1.05 times the recorded memory"),
        (trial(candidate(), None), "it ended as oom"),
    ],
)
def test_one_local_trial_keeps_or_breaks_a_promise(local: TrialResult, why: str | None) -> None:
    told = find_mismatch(PROMISED, local, TIME_TOLERANCE)
    assert told is None if why is None else why in (told or "")
