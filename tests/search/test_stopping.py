"""A search goes on as long as that pays, and as long as something smaller may run."""

import pytest

from autotune.search.next import ResidualSearch, SearchLimits
from autotune.search.problem import PlanningProblem
from tests.builders import GIB, hardware, trial
from tests.search.machines import CAPABILITIES, HARDWARE, answer, make_plan, request, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")


def test_smaller_settings_follow_a_failure():
    large, asked = hardware(*CAPABILITIES, budget_bytes=40 * GIB), request(resolution=(1024, 1024))
    predict = PlanningProblem.build(asked, large, surroundings()).cost.predict

    def run(candidate):
        fits = predict(candidate).run_memory_bytes < 16 * GIB
        return answer(candidate) if fits else trial(candidate, None, outcome="oom")

    trials = make_plan(asked, large, backend=surroundings(run)).frozen.trials
    assert trials[0].outcome == "oom"


@pytest.mark.parametrize(("num_steps", "is_over"), [(100, True), (1000, False)])
def test_late_searches_weigh_their_gain(num_steps, is_over):
    case = PlanningProblem.build(request(), HARDWARE, surroundings())
    search = ResidualSearch(case.space, case.cost, case.budget_bytes)
    first = search.next_candidate(())
    assert first is not None
    results = (answer(first).changed(wall_seconds=70.0),)  # 5% of both runs is less
    assert search.is_over(SearchLimits(8, None, num_steps), results) == is_over
    assert search.is_over(SearchLimits(8, 60.0, num_steps), results), "the user's limit holds"
