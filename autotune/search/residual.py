"""Which candidate to try next, and whether any is worth it: pure.

The smallest first, which is the safest; then by expected improvement on predictions that all results have corrected.
Only candidates of the enumerated space, each at most once, none that is predicted not to fit or is at least as large as
one that ran out of memory.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from autotune.cost import NOISE, Predictor, PriorResiduals, residual_of
from autotune.schema import Candidate, Objective, Prediction, TrialResult
from autotune.search.space import SearchSpace

OPTIMISM = 1.5
"""Standard deviations of what is uncertain that the stop rule hopes for: fewer ended searches too early (the log)."""

CAUTION = 1.0
"""Standard deviations by which a step's predicted memory must stay below the budget."""

WORTHWHILE_GAIN = 0.03
"""The search stops when the best remaining candidate is not expected to save more than this share."""

GROWTH = 1.5
"""Times the largest that has run, that the next may be predicted to need on shared memory: predictions are corrected by
every trial, and stay right that near to it."""
SAFE_SHARE = 0.5
"""Of the budget: what is predicted to need less may be wrong by a factor of two and still fits."""

BROKEN = ("unsupported", "numerics")
"""Outcomes that condemn a combination of backends rather than a size."""


@dataclass(frozen=True)
class ScoredCandidate:
    """An untried candidate that may run, and what is expected of it."""

    candidate: Candidate
    expected: float
    """Natural logarithm of step seconds, or of bytes where memory is the objective."""
    uncertainty: float
    """One sigma of `expected`."""
    step_seconds: float
    required_bytes: float
    """What it may take at most, as far as is known."""

    @property
    def lower_bound(self) -> float:
        """Lower confidence bound of the logarithm."""
        return self.expected - OPTIMISM * self.uncertainty

    def improvement(self, best: float) -> float:
        """Expected improvement on the logarithm `best` (Jones, Schonlau and Welch, 1998, equation 15)."""
        sigma = max(self.uncertainty, 1e-9)
        z = (best - self.expected) / sigma
        return sigma * (z * math.erfc(-z / math.sqrt(2)) / 2 + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def best_seconds(results: Sequence[TrialResult]) -> float:
    """Fastest median step so far; infinite when none ran."""
    return min((r.median_step_seconds or math.inf for r in results if r.outcome == "ok"), default=math.inf)


class ResidualSearch:
    """Expected improvement of what the objective counts, among what is predicted to fit.

    Args:
        space: the admissible candidates.
        cost: predicts them, and learns from results.
        budget_bytes: what a run may take on the device.
        lessons: what similar machines have learned, as far as trials here leave it believable.
        first: tried before all others, e.g. what won elsewhere.
        ascending: never reach far beyond what has run: where memory is the host's, an over-allocation hangs it.
    """

    def __init__(
        self,
        space: SearchSpace,
        cost: Predictor,
        budget_bytes: int,
        *,
        priors: Callable[[Sequence[TrialResult]], Sequence[PriorResiduals]] = lambda results: (),
        first: Sequence[Candidate] = (),
        objective: Objective = "throughput",
        ascending: bool = False,
    ) -> None:
        self.space, self.cost, self.budget_bytes = space, cost, budget_bytes
        self.priors, self.first, self.objective, self.ascending = priors, first, objective, ascending

    def next_candidate(
        self, results: Sequence[TrialResult], taken: Collection[Candidate] = frozenset()
    ) -> Candidate | None:
        """What to try after `results` while others try `taken`; None when nothing is left that could run."""
        tried = {result.candidate for result in results} | set(taken)
        known = next((candidate for candidate in self.first if candidate not in tried), None)
        if known:
            return known
        outlooks = self.outlooks(results, taken)
        if not outlooks:
            return None
        if any(result.outcome == "ok" for result in results):
            best = self._best(results)
            apart = [outlook for outlook in outlooks if not any(_alike(outlook.candidate, other) for other in taken)]
            promising = max(apart or outlooks, key=lambda outlook: (outlook.improvement(best), -outlook.lower_bound))
            return (self._on_the_way(promising, outlooks, results) if self.ascending else promising).candidate
        return min(outlooks, key=lambda outlook: outlook.required_bytes).candidate

    def outlooks(
        self, results: Sequence[TrialResult], taken: Collection[Candidate] = frozenset()
    ) -> list[ScoredCandidate]:
        """Candidates neither tried nor hopeless, with what is expected of them after `results`."""
        self.cost.calibrate(results, self.priors(results))
        tried = {result.candidate for result in results} | set(taken)
        barred = {(r.candidate.attention, r.candidate.quantization) for r in results if r.outcome in BROKEN}
        # Without a step it was the weights themselves that missed the quality floor: no attention changes that.
        too_far = {r.candidate.quantization for r in results if r.outcome == "numerics" and not r.step_seconds}
        limit, most_of_host = self._limit_bytes(results), self._limit_of_host(results)
        found = []
        for candidate in self.space.candidates:
            storage = candidate.quantization
            if candidate in tried or storage in too_far or (candidate.attention, storage) in barred:
                continue
            prediction = self.cost.predict(candidate)
            required = memory_upper_bound(prediction)
            if required < limit and prediction.host_memory_bytes <= most_of_host:
                found.append(self._outlook(prediction, required))
        # On memory of its own a trial has a cap: where caution alone is against a first one, being wrong costs no more.
        return found if found or results or taken or self.ascending else self._smallest_only()

    def _smallest_only(self) -> list[ScoredCandidate]:
        """The candidate that needs least, where that is predicted to fit."""
        predictions = [self.cost.predict(candidate) for candidate in self.space.candidates]
        least = min(predictions, key=lambda prediction: prediction.required_memory_bytes)
        needed = least.required_memory_bytes
        return [self._outlook(least, needed)] if needed <= self.budget_bytes else []

    def _outlook(self, prediction: Prediction, required_bytes: float) -> ScoredCandidate:
        expected, uncertainty = self._expected(prediction)
        return ScoredCandidate(prediction.candidate, expected, uncertainty, prediction.step_seconds, required_bytes)

    def nothing_to_gain(self, results: Sequence[TrialResult], taken: Collection[Candidate] = frozenset()) -> bool:
        """Whether no remaining candidate is expected to be better by a worthwhile share than the best that ran."""
        remaining = self.outlooks(results, taken)
        if not remaining or not any(result.outcome == "ok" for result in results):
            return not remaining
        return min(outlook.lower_bound for outlook in remaining) > self._best(results) + math.log1p(-WORTHWHILE_GAIN)

    def is_surprised(self, results: Sequence[TrialResult]) -> bool:
        """Whether predictions were overconfident: each result against the prediction made from those before it.

        Told by the mean squared error in units of the predicted variance, which is 1 where uncertainties are right.
        """
        squares = []
        for number, result in enumerate(results):
            self.cost.calibrate(results[:number], self.priors(results[:number]))
            prediction = self.cost.predict(result.candidate)
            if error := residual_of(result, prediction):
                squares.append(error.time**2 / (prediction.time_uncertainty**2 + NOISE["time"] ** 2))
                squares.append(error.memory**2 / (prediction.memory_uncertainty**2 + NOISE["memory"] ** 2))
        return bool(squares) and statistics.fmean(squares) > 1

    def _best(self, results: Sequence[TrialResult]) -> float:
        """Natural logarithm of the best that the objective has counted; some result must have run."""
        if self.objective == "memory":
            return math.log(min(r.peak_memory_bytes or math.inf for r in results if r.outcome == "ok"))
        return math.log(best_seconds(results))

    def _expected(self, prediction: Prediction) -> tuple[float, float]:
        if self.objective == "memory":
            return math.log(prediction.allocated_memory_bytes), prediction.memory_uncertainty
        return math.log(prediction.step_seconds), prediction.time_uncertainty

    def _on_the_way(
        self, best: ScoredCandidate, outlooks: Sequence[ScoredCandidate], results: Sequence[TrialResult]
    ) -> ScoredCandidate:
        """`best` where it is within reach of what has run, else the largest that is: predictions err by factors."""
        largest = max(self._required(result) for result in results if result.outcome == "ok")
        reach = max(GROWTH * largest, SAFE_SHARE * self.budget_bytes)
        if best.required_bytes <= reach:
            return best
        nearer = [outlook for outlook in outlooks if outlook.required_bytes <= reach]
        if nearer:
            return max(nearer, key=lambda outlook: outlook.required_bytes)
        return min(outlooks, key=lambda outlook: outlook.required_bytes)

    def _limit_bytes(self, results: Sequence[TrialResult]) -> float:
        """What may still be taken: the budget or, once something ran out, halfway between what ran and what did not.

        What took more than it may and yet was measured has corrected the predictions instead.
        """
        failed = [r for r in results if r.outcome in ("oom", "spill")]
        too_large = [self._required(r) for r in failed if r.outcome == "spill" or r.peak_memory_bytes is None]
        if not too_large:
            return self.budget_bytes
        ran = max((self._required(r) for r in results if r.outcome == "ok"), default=0.0)
        return min(self.budget_bytes, (ran + min(too_large)) / 2)

    def _limit_of_host(self, results: Sequence[TrialResult]) -> float:
        """Of the host's memory: no more than what ran out of it was predicted to take; others may have been there."""
        ran_out = [result.candidate for result in results if result.outcome == "host_oom"]
        return min((self.cost.predict(candidate).host_memory_bytes for candidate in ran_out), default=math.inf)

    def _required(self, result: TrialResult) -> float:
        return memory_upper_bound(self.cost.predict(result.candidate))


def _alike(one: Candidate, other: Candidate) -> bool:
    """Whether trials of both at the same time would teach the same."""
    return all(getattr(one, name) == getattr(other, name) for name in ("quantization", "attention", "micro_batch_size"))


def memory_upper_bound(prediction: Prediction) -> float:
    """What a run may need in its neediest phase: uncertain is the step alone."""
    others = max((phase.peak_memory_bytes for phase in prediction.phases if phase.name != "train"), default=0)
    return max(others, prediction.peak_memory_bytes * math.exp(CAUTION * prediction.memory_uncertainty))
