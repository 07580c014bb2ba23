"""Chooses the next candidate: a safe one first, then by confidence bound on the residuals of the prior.

An Optuna sampler, so that storage, resuming and several workers come from Optuna. It only ever proposes candidates of
the enumerated space, each at most once, and none that needs more memory than one that already ran out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.schema import Candidate, TrialResult
from autotune.search.belief import Belief, Prior, believe
from autotune.search.space import SearchSpace

RESULT = "result"
"""Trial attribute that holds the TrialResult as JSON."""

OPTIMISM = 1.0
"""Standard deviations that the confidence bound gives to what is uncertain."""


def results_of(study: Study) -> list[TrialResult]:
    """Every finished trial's result, in order."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [TrialResult.model_validate_json(trial.user_attrs[RESULT]) for trial in trials]


class ResidualSampler(BaseSampler):
    """Lower confidence bound on step seconds, under what memory failures have taught.

    Args:
        space: the admissible candidates.
        prior: expected step seconds before any trial, up to a common factor.
        memory: expected bytes, up to a common factor; only the order matters.
    """

    def __init__(self, space: SearchSpace, prior: Prior, memory: Callable[[Candidate], float]) -> None:
        self.space, self.prior, self.memory = space, prior, memory

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: CategoricalDistribution(choices) for name, choices in self.space.choices.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        chosen = self.next_candidate(results_of(study))
        if chosen is None:
            raise RuntimeError("the study should have stopped: no candidate is left")
        return {name: getattr(chosen, name) for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise RuntimeError(f"{param_name} is not part of the search space")

    def next_candidate(self, results: Sequence[TrialResult]) -> Candidate | None:
        """What to try after `results`; None when nothing untried is left that could run."""
        open_candidates = self.open_candidates(results)
        if not open_candidates:
            return None
        if not any(result.outcome == "ok" for result in results):
            return min(open_candidates, key=self.memory)
        belief = self.belief(results)
        return min(open_candidates, key=lambda c: belief.mean[c] - OPTIMISM * belief.sigma[c])

    def open_candidates(self, results: Sequence[TrialResult]) -> list[Candidate]:
        """Candidates neither tried nor hopeless."""
        tried = {result.candidate for result in results}
        limits = [self.memory(result.candidate) for result in results if result.outcome in ("oom", "spill")]
        limit = min(limits, default=math.inf)
        barred = {(r.candidate.attention, r.candidate.quantization) for r in results if r.outcome in BROKEN}
        return [
            candidate
            for candidate in self.space.candidates
            if candidate not in tried
            and self.memory(candidate) < limit
            and (candidate.attention, candidate.quantization) not in barred
        ]

    def belief(self, results: Sequence[TrialResult]) -> Belief:
        """What is believed of every candidate of the space after `results`."""
        return believe(self.space.candidates, self.space.choices, self.prior, measured_seconds(results))


BROKEN = ("unsupported", "numerics")
"""Outcomes that condemn a combination of backends rather than a size."""


def measured_seconds(results: Sequence[TrialResult]) -> Mapping[Candidate, float]:
    """Median step seconds of the trials that ran."""
    return {
        result.candidate: seconds
        for result in results
        if result.outcome == "ok" and (seconds := result.median_step_seconds) is not None
    }
