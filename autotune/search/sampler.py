"""Chooses the next candidate: the smallest first, which is the safest, then by confidence bound on predictions.

An Optuna sampler, so that storage, resuming and several workers come from Optuna. It only ever proposes candidates of
the enumerated space, each at most once, and none that is predicted not to fit or is at least as large as one that ran
out of memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.prediction import Prediction
from autotune.schema import Candidate, TrialResult
from autotune.search.space import SearchSpace

RESULT = "result"
"""Trial attribute that holds the TrialResult as JSON."""

OPTIMISM = 1.0
"""Standard deviations that the confidence bound gives to what is uncertain."""

CAUTION = 1.0
"""Standard deviations by which predicted memory must stay below the budget."""

BROKEN = ("unsupported", "numerics")
"""Outcomes that condemn a combination of backends rather than a size."""


LOOKED_AT = ("quantization", "attention")
"""Knobs whose values are names of code: how fast it is on a machine is known only once it has run there."""


class CostModel(Protocol):
    """What the search asks of predictions; `autotune.cost.predict.Predictor` answers it."""

    def predict(self, candidate: Candidate) -> Prediction:
        """Memory and step time, after whatever has been learned."""
        ...

    def calibrate(self, trials: Sequence[TrialResult]) -> None:
        """Learn from all `trials` at once."""
        ...


@dataclass(frozen=True)
class Outlook:
    """An untried candidate that may run, and what is expected of it."""

    candidate: Candidate
    log_seconds: float
    sigma: float
    required_bytes: float
    """What it may take at most, as far as is known."""

    @property
    def hope(self) -> float:
        """Lower confidence bound of log step seconds."""
        return self.log_seconds - OPTIMISM * self.sigma


def results_of(study: Study) -> list[TrialResult]:
    """Every finished trial's result, in order."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [TrialResult.model_validate_json(trial.user_attrs[RESULT]) for trial in trials]


def best_seconds(results: Sequence[TrialResult]) -> float:
    """Fastest median step so far; infinite when none ran."""
    return min((r.median_step_seconds or math.inf for r in results if r.outcome == "ok"), default=math.inf)


class ResidualSampler(BaseSampler):
    """Lower confidence bound on step seconds among what is predicted to fit.

    Args:
        space: the admissible candidates.
        cost: predicts them, and learns from results.
        budget_bytes: what a run may take on the device.
        elsewhere: trials of a similar machine; they correct predictions until a trial has run here.
    """

    def __init__(
        self, space: SearchSpace, cost: CostModel, budget_bytes: int, elsewhere: Sequence[TrialResult] = ()
    ) -> None:
        self.space, self.cost, self.budget_bytes, self.elsewhere = space, cost, budget_bytes, elsewhere

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
        outlooks = self.outlooks(results)
        if not outlooks:
            return None
        if any(result.outcome == "ok" for result in results):
            unseen = self._unseen(results)
            return min(outlooks, key=lambda o: (-_count(o.candidate, unseen), o.hope)).candidate
        return min(outlooks, key=lambda outlook: outlook.required_bytes).candidate

    def outlooks(self, results: Sequence[TrialResult]) -> list[Outlook]:
        """Candidates neither tried nor hopeless, with what is expected of them after `results`."""
        ran_here = any(result.outcome == "ok" for result in results)
        self.cost.calibrate(results if ran_here else self.elsewhere)
        tried = {result.candidate for result in results}
        barred = {(r.candidate.attention, r.candidate.quantization) for r in results if r.outcome in BROKEN}
        limit = self._limit_bytes(results)
        found = []
        for candidate in self.space.candidates:
            if candidate in tried or (candidate.attention, candidate.quantization) in barred:
                continue
            prediction = self.cost.predict(candidate)
            required = _cautious(prediction)
            if required < limit:
                seconds = math.log(prediction.step_seconds)
                found.append(Outlook(candidate, seconds, prediction.time_uncertainty, required))
        return found

    def _unseen(self, results: Sequence[TrialResult]) -> set[tuple[str, str]]:
        """Storages and backends that no trial has used: their names cannot be interpolated, so each gets one look."""
        tried = {(name, getattr(result.candidate, name)) for result in results for name in LOOKED_AT}
        return {(name, str(choice)) for name in LOOKED_AT for choice in self.space.choices[name]} - tried

    def _limit_bytes(self, results: Sequence[TrialResult]) -> float:
        """What may still be taken: the budget or, once something ran out, halfway between what ran and what did not."""
        too_large = [self._required(r) for r in results if r.outcome in ("oom", "spill")]
        if not too_large:
            return self.budget_bytes
        ran = max((self._required(r) for r in results if r.outcome == "ok"), default=0.0)
        return min(self.budget_bytes, (ran + min(too_large)) / 2)

    def _required(self, result: TrialResult) -> float:
        return _cautious(self.cost.predict(result.candidate))


def _count(candidate: Candidate, unseen: set[tuple[str, str]]) -> int:
    return sum((name, getattr(candidate, name)) in unseen for name in LOOKED_AT)


def _cautious(prediction: Prediction) -> float:
    return prediction.required_memory_bytes * math.exp(CAUTION * prediction.memory_uncertainty)
