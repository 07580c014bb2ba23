"""Searches stop where it pays, and a plan promises what its winner did for longer."""

from dataclasses import replace

import pytest

from autotune.events import TrialFinished
from autotune.plan.candidate import PhasePeak, TrialResult
from autotune.plan.plan import Reason
from autotune.search import winner
from autotune.search.next import ResidualSearch, SearchLimits
from autotune.search.problem import PlanningProblem
from tests.builders import GIB, hardware, trial
from tests.events import events_of
from tests.search.machines import CAPABILITIES, HARDWARE, answer, make_plan, request, surroundings

FEW = tuple((name, "0") for name in ("selective_blocks", "swapped_blocks"))
"""Fewer settings to choose from: a plan in a third of the time."""


pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.fixture(scope="module")
def case(_by_formula):
    compiling = hardware(*CAPABILITIES, "compile", compute_capability=(9, 0))
    return PlanningProblem.build(request(pins=FEW), compiling, surroundings())


def longer(of, seconds, **changes):
    return trial(of, seconds, confirms=True, **changes)


def test_disturbed_trials_are_repeated():
    asked, told = request(pins=FEW, max_trials=6), list[TrialResult]()
    slowed = []

    def run(candidate):
        result = answer(candidate)
        if len(told) != 1 or slowed:
            return result
        slowed.append(candidate)
        return result.changed(step_seconds=(9.0,))

    listen = events_of(TrialFinished, lambda event: told.append(event.result))
    frozen = make_plan(asked, HARDWARE, listen, surroundings(run)).frozen
    steps = [(trial.candidate, trial.step_seconds) for trial in frozen.trials]
    assert steps == [(trial.candidate, trial.step_seconds) for trial in told]
    ends = [trial.outcome for trial in frozen.trials if trial.candidate == slowed[0]]
    assert ends == ["disturbed", "ok"]


@pytest.mark.parametrize(
    ("short", "long", "confirmed"),
    [
        ((1.0, 1.02, 1.5, None), (1.06, 1.01), (0, 1)),
        ((1.0, 1.2, 1.5), (None, 3.0, 1.6), (0, 1, 2)),
        ((1.0, 1.08), (1.06, 1.0), (0, 1)),  # within 3% of what lasted
        ((1.0, 1.1), (1.06,), (0,)),
        ((1.0, 1.04, 1.08), (1.2, 1.15, 1.1), (0, 1, 2)),  # by 5% better than the second
        ((1.0, 1.04, 1.1), (1.2, 1.15), (0, 1)),
        ((1.0, 1.04, 1.08, 1.12), (1.9, 1.8, 1.7), (0, 1, 2)),
        ((None, None), (), ()),
    ],
)
def test_winners_are_confirmed_in_turn(case, short, long, confirmed):
    """By short and long seconds of settings that differ in what is recomputed alone."""
    settings = [case.space.candidates[0].changed(checkpointed_blocks=n) for n in range(4)]
    seen = {one: longer(one, seconds) for one, seconds in zip(settings, long, strict=False)}
    shorts = tuple(trial(one, seconds) for one, seconds in zip(settings, short, strict=False))
    trials = winner.confirm_winner(shorts, case, lambda candidate: seen[candidate])
    assert trials == (*shorts, *(seen[settings[number]] for number in confirmed))
    assert winner.confirm_winner(shorts, case, lambda candidate: None) == shorts


def test_fallbacks_are_tried_if_needed(case):
    largest = max(case.space.candidates, key=lambda c: case.cost.predict(c).run_memory_bytes)
    smallest = min(case.space.candidates, key=lambda c: case.cost.predict(c).run_memory_bytes)
    large = trial(largest, 1.0, 20 * GIB)
    fallback = winner.choose_untried_fallback((large,), case)
    assert fallback is not None
    cost = case.cost.with_calibration((large,))
    assert cost.predict(fallback).run_memory_bytes <= 0.9 * cost.predict(largest).run_memory_bytes
    assert winner.choose_untried_fallback((large, trial(smallest, 2.0, 10 * GIB)), case) is None
    assert winner.choose_untried_fallback((trial(smallest, 1.0, 10 * GIB),), case) is None


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_compiling_must_pay_beside_the_fastest(case, monkeypatch, objective):
    monkeypatch.setattr("autotune.knobs.registry.STARTUP_SECONDS", {"cuda": 100.0})
    by_memory = sorted(case.space.candidates, key=lambda each: answer(each).peak_memory_bytes)
    slow, fast = trials = tuple(answer(each) for each in (by_memory[0], by_memory[-1]))
    cost, compiled = case.cost.with_calibration(trials), winner.compiled_from(fast.candidate, case)
    needed = {}
    for each in trials:
        payback = winner.predicted_payback(cost, each.candidate, compiled, 1)
        needed[each] = round(payback.startup_seconds / payback.saved_seconds)
    assert needed[slow] < 0.5 * needed[fast]
    work = case.workload.changed(objective=objective)
    for num_steps, pays in ((2 * needed[slow], False), (2 * needed[fast], True)):
        asked = replace(case, workload=work, job=case.job.changed(num_steps=num_steps))
        expected = compiled if pays and objective == "throughput" else None
        assert winner.choose_compiled(trials, asked) == expected
        before = Reason(knob="compile", chosen="off", why="")
        (told,) = winner.explain_compile((before,), trials, asked, fast.candidate)
        forecast = winner.predicted_payback(cost, fast.candidate, compiled, num_steps)
        assert (str(forecast) in told.rejected[0].reason) == (objective == "throughput")
    for more in (0, -1):
        budget = case.cost.with_calibration((fast,)).predict(compiled).run_memory_bytes + more
        device = asked.cost.hardware.device.changed(budget_bytes=budget)
        hardware = asked.cost.hardware.changed(device=device)
        tight = replace(asked, cost=replace(asked.cost, hardware=hardware))
        assert (winner.choose_compiled((fast,), tight) is None) == (not expected or more == -1)


def test_plans_promise_the_longer_trial():
    phase = PhasePeak(name="previews", seconds=1.0, device_bytes=22 * GIB, host_bytes=GIB)

    def rehearse(model, cost, candidate, max_seconds):
        return longer(candidate, 5.0, memory=GIB, phases=(phase,))

    backend = replace(surroundings(), rehearse=rehearse)
    plan = make_plan(request(pins=FEW), HARDWARE, backend=backend)
    expected = plan.frozen.expected
    assert plan.frozen.trials[-1].confirms
    assert expected.step_seconds == 5.0  # what lasted, though shorter trials of others were faster
    assert expected.phases == (phase,)
    assert expected.run_memory_bytes == 22 * GIB + expected.process_memory_bytes


@pytest.mark.parametrize(("num_steps", "is_over"), [(100, True), (1000, False)])
def test_late_searches_weigh_their_gain(num_steps, is_over):
    case = PlanningProblem.build(request(), HARDWARE, surroundings())
    search = ResidualSearch(case.space, case.cost, case.budget_bytes)
    first = search.next_candidate(())
    assert first is not None
    results = (answer(first).changed(wall_seconds=70.0),)  # 5% of both runs is less
    assert search.is_over(SearchLimits(8, None, num_steps), results) == is_over
    assert search.is_over(SearchLimits(8, 60.0, num_steps), results), "the user's limit holds"
