"""One trial that another program disturbed does not decide the winner."""

import pytest

from autotune.plan.candidate import Candidate
from autotune.plan.trial import TrialResult
from tests.builders import trial
from tests.planning.machines import HARDWARE, answer, make_plan, request, surroundings


@pytest.mark.usefixtures("_by_formula")
@pytest.mark.parametrize("slowdown", [2.0, 4.0])
def test_the_best_candidate_wins_though_its_first_trial_was_disturbed(slowdown: float) -> None:
    quiet = make_plan(request(), HARDWARE, backend=surroundings())
    best, seen = quiet.frozen.settings, list[Candidate]()

    def disturbed(candidate: Candidate) -> TrialResult:
        seen.append(candidate)
        result = answer(candidate)
        if candidate != best or seen.count(best) > 1:
            return result
        seconds = slowdown * (result.median_step_seconds or 0.0)
        return trial(candidate, seconds, result.peak_memory_bytes or 0, wall_seconds=5.0)

    plan = make_plan(request(), HARDWARE, backend=surroundings(disturbed))
    assert plan.frozen.expected.step_seconds <= 1.03 * quiet.frozen.expected.step_seconds
    assert len(seen) <= len(quiet.frozen.trials) + 3
