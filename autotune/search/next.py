"""Chooses which candidate to try next, and whether any is worth it: pure.

The first is the fastest that surely fits, or else the smallest. The others have the largest
expected improvement, by predictions that all results have corrected, weighed by the chance to fit.
A candidate is left out if it is predicted not to fit or as large as one that ran out; on shared
memory also if it may not fit.
"""

import math
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autotune.cost.calibration import NOISE, PriorResiduals
from autotune.cost.predict import CostModel, prediction_errors
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.prediction import Prediction
from autotune.plan.workload import Objective
from autotune.search.space import SearchSpace

SHARE_OF_RUN = 0.05  # of the planned run's time: beyond it each trial must be expected to pay
MIN_SECONDS = 60.0
MIN_TRIALS = 7  # with 6, two of nine searches stopped too early (benchmarks/DECISIONS.md)
MIN_TRIALS_WITH_PRIORS = 4  # the same if records of similar machines hold
NUM_EXTRA_TRIALS = 2  # if predictions were overconfident: 8, 9 and 10 in all were tried
STOP_SIGMAS = 1.5  # that a candidate may be better than predicted: fewer ended searches too early
CAUTION_SIGMAS = 1.0  # that a step may take more than predicted; on shared memory it must still fit
MIN_GAIN = 0.03  # the search stops when no remaining candidate is expected to save more
MAX_GROWTH = 1.5  # of need over the largest that ran, on shared memory: predictions hold so near
SAFE_SHARE = 0.5  # of the budget: a prediction below it may be wrong by a factor of two and fits
FIRST_SHARE = 0.9  # the same where a first trial that runs out costs no more than its time
CLEARLY_LESS = 0.9  # share of what ran out, if nothing has run yet: what needs less is tried
COMPARE_AFTER = 6  # trials until the libraries' own way is compared: two more may follow
DOUBT_SIGMAS = 2.0  # that a trial must be slower than all others let expect to be tried again
MIN_WITNESSES = 4  # trials that must have run before one of them is doubted
BROKEN_OUTCOMES = ("unsupported", "numerics")  # they condemn backends rather than a size

Results = Sequence[TrialResult]


@dataclass(frozen=True)
class ScoredCandidate:
    """An untried candidate that may run, and what is expected of it."""

    candidate: Candidate
    expected: float
    """Natural logarithm of what the objective wants little of: step seconds or bytes."""
    uncertainty: float  # one sigma of it
    step_seconds: float
    required_bytes: float  # at most, as far as is known
    chance_to_fit: float

    @property
    def lower_bound(self) -> float:
        return self.expected - STOP_SIGMAS * self.uncertainty

    def expected_improvement(self, best: float) -> float:
        """Compute the improvement on the logarithm `best` (Jones, Schonlau and Welch, 1998,
        equation 15), as far as it fits (Gardner et al., 2014, equation 6)."""
        sigma = max(self.uncertainty, 1e-9)
        z = (best - self.expected) / sigma
        gain = sigma * (z * _normal_share(z) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
        return self.chance_to_fit * gain


def _normal_share(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def best_seconds(results: Results) -> float:
    """Find the fastest median step so far; infinite if none ran."""
    return min((r.median_step_seconds or math.inf for r in _ran(results)), default=math.inf)


def search_cost_seconds(results: Results) -> float:
    """Add up what trials took, loading included."""
    return math.fsum(result.wall_seconds or 0.0 for result in results)


def _ran(results: Results) -> list[TrialResult]:
    return [result for result in results if result.outcome == "ok"]


@dataclass(frozen=True)
class SearchLimits:
    """Limits that end a search."""

    max_trials: int
    max_seconds: float | None = None
    """Seconds of trials, all workers' together; None for a share of the run, at least a minute,
    and beyond it as long as another trial is expected to pay."""
    num_steps: int = 1

    def allowed_seconds(self, step_seconds: float) -> float:
        """Limit the seconds of trials for a run whose steps take `step_seconds`."""
        if self.max_seconds is not None:
            return self.max_seconds
        return max(MIN_SECONDS, SHARE_OF_RUN * self.num_steps * step_seconds)


class ResidualSearch:
    """Expected improvement of what the objective counts, among what is predicted to fit. `priors`
    gives what records taught; `first` is tried before all others. If `ascending`, trials stay near
    to what has run: an over-allocation of memory that is the host's hangs it."""

    def __init__(
        self,
        space: SearchSpace,
        cost: CostModel,
        budget_bytes: int,
        *,
        priors: Callable[[Results], Sequence[PriorResiduals]] = lambda results: (),
        first: Sequence[Candidate] = (),
        objective: Objective = "throughput",
        ascending: bool = False,
    ) -> None:
        self.space, self.cost, self.budget_bytes = space, cost, budget_bytes
        self.priors, self.first = priors, first
        self.objective, self.ascending = objective, ascending
        candidates = sorted(space.candidates, key=lambda candidate: candidate.swapped_blocks)
        # Records order trials; that no other is worth one, trials here must show alone.
        self._alone = self
        if first or priors(()):
            self._alone = ResidualSearch(
                space, cost, budget_bytes, objective=objective, ascending=ascending
            )
        self._by_swap = [(_without_swap(candidate), candidate) for candidate in candidates]
        self._remaining = lru_cache(maxsize=4)(self._find_remaining)

    def next_candidate(
        self, results: Results, running: Collection[Candidate] = frozenset()
    ) -> Candidate | None:
        """Choose what to try while others try `running`; None if nothing is left."""
        tried = {result.candidate for result in results} | set(running)
        if first := next((candidate for candidate in self.first if candidate not in tried), None):
            return first
        remaining = self.remaining(results, running)
        if self._alone is not self and self._expects_no_gain(results, running):
            return self._alone.next_candidate(results, running)
        comparison = self._comparison(results, running)
        if comparison and (len(tried) >= COMPARE_AFTER or self._expects_no_gain(results, running)):
            return comparison
        if not remaining:
            return None
        taught = set(map(_taught_by, running))
        apart = [scored for scored in remaining if _taught_by(scored.candidate) not in taught]
        if _ran(results):
            best = self._best(results)
            promising = max(
                apart or remaining,
                key=lambda scored: (scored.expected_improvement(best), -scored.lower_bound),
            )
            if self.ascending:
                promising = self._within_reach(promising, remaining, results)
            return promising.candidate
        safe_bytes = (SAFE_SHARE if self.ascending else FIRST_SHARE) * self.budget_bytes
        safe = [scored for scored in apart if scored.required_bytes <= safe_bytes]
        is_first = bool(safe) and not results

        def order(scored: ScoredCandidate) -> tuple[bool, float]:
            # What fits without swapping calibrates as well, in less time.
            amount = scored.expected if is_first else scored.required_bytes
            return scored.candidate.swapped_blocks > 0, amount

        return min(safe if is_first else remaining, key=order).candidate

    def remaining(
        self, results: Results, running: Collection[Candidate] = frozenset()
    ) -> list[ScoredCandidate]:
        """Score untried candidates that may run, the least block swap of those alike otherwise."""
        return self._remaining(tuple(results), frozenset(running))

    def _find_remaining(
        self, results: tuple[TrialResult, ...], running: frozenset[Candidate]
    ) -> list[ScoredCandidate]:
        cost = self._calibrate(results)
        tried = {result.candidate for result in results} | running
        broken, too_coarse = set(), set()
        for result in results:
            quantization = result.candidate.quantization
            if result.outcome in BROKEN_OUTCOMES:
                broken.add((result.candidate.attention, quantization))
            # Without a step it was the weights themselves that missed the quality floor.
            if result.outcome == "numerics" and not result.step_seconds:
                too_coarse.add(quantization)
        fewest: dict[object, int] = {}
        wants_fewest = self.objective != "memory"
        for result in _ran(results) if wants_fewest else ():
            key = _without_swap(result.candidate)
            fewest[key] = min(fewest.get(key, sys.maxsize), result.candidate.swapped_blocks)
        limit, host_limit = self._memory_limit(results, cost), _host_memory_limit(results, cost)
        found = []
        for key, candidate in self._by_swap:
            quantization = candidate.quantization
            is_barred = quantization in too_coarse or (candidate.attention, quantization) in broken
            is_barred |= candidate.swapped_blocks > fewest.get(key, sys.maxsize)
            if candidate in tried or is_barred:
                continue
            prediction = cost.predict(candidate)
            required = memory_upper_bound(prediction)
            # On shared memory nothing is tried that may not fit; elsewhere it costs a trial.
            needed = required if self.ascending else prediction.run_memory_bytes
            if needed < limit and prediction.host_memory_bytes <= host_limit:
                room = math.log(limit / prediction.training.run_memory_bytes)
                chance = _normal_share(room / max(prediction.memory_uncertainty, 1e-9))
                found.append(self._score(prediction, required, chance))
                if wants_fewest:
                    fewest[key] = candidate.swapped_blocks
        if found or results or running or self.ascending:
            return found
        # A trial has a cap: the smallest is tried even if uncertainty alone speaks against it.
        predictions = (cost.predict(candidate) for candidate in self.space.candidates)
        smallest = min(predictions, key=lambda prediction: prediction.run_memory_bytes)
        needed = smallest.run_memory_bytes
        return [self._score(smallest, needed, 1.0)] if needed <= self.budget_bytes else []

    def _calibrate(self, results: Results) -> CostModel:
        return self.cost.with_calibration(results, self.priors(results))

    def _score(
        self, prediction: Prediction, required_bytes: float, chance_to_fit: float
    ) -> ScoredCandidate:
        seconds, uncertainty = prediction.step_seconds, prediction.time_uncertainty
        expected: float = seconds
        if self.objective == "memory":
            expected = prediction.allocated_memory_bytes
            uncertainty = prediction.memory_uncertainty
        known = math.log(expected), uncertainty, seconds, required_bytes
        return ScoredCandidate(prediction.candidate, *known, chance_to_fit)

    def is_settled(self, results: Results) -> bool:
        """Tell if `results` alone, whatever records say of them, make all other trials needless."""
        return self._alone.is_over(SearchLimits(sys.maxsize, math.inf), results)

    def is_over(
        self,
        limits: SearchLimits,
        results: Results,
        running: Collection[Candidate] = (),
        has_waiting: bool = False,
    ) -> bool:
        """Tell if no trial should follow; `has_waiting` if a dead worker's is to be retried."""
        num_trials, best = len(results) + len(running), best_seconds(results)
        has_run = not math.isinf(best)
        fastest = best if has_run else min(s.step_seconds for s in self.remaining(()))
        is_late = search_cost_seconds(results) >= limits.allowed_seconds(fastest)
        if limits.max_seconds is None and is_late:
            is_late = has_run and not self._pays(limits.num_steps, results, running)
        if num_trials >= limits.max_trials or (results and is_late):
            return True
        if has_waiting:
            return False
        min_trials = MIN_TRIALS_WITH_PRIORS
        if not self.priors(results):
            min_trials = MIN_TRIALS + NUM_EXTRA_TRIALS * self.is_overconfident(results)
        if num_trials < min_trials or not has_run:
            return not self._alone.remaining(results, running)
        is_compared = self._comparison(results, running) is None
        return is_compared and self._alone._expects_no_gain(results, running)

    def _pays(self, num_steps: int, results: Results, running: Collection[Candidate]) -> bool:
        if self.objective == "memory":
            return False
        best = self._best(results)
        gains = (each.expected_improvement(best) for each in self.remaining(results, running))
        trial_seconds = search_cost_seconds(results) / len(results)
        saved_seconds = max(gains, default=0.0) * best_seconds(results) * num_steps
        return saved_seconds > trial_seconds

    def _expects_no_gain(self, results: Results, running: Collection[Candidate]) -> bool:
        remaining = self.remaining(results, running)
        if not remaining or not _ran(results):
            return not remaining
        worth_trying = self._best(results) + math.log1p(-MIN_GAIN)
        return min(scored.lower_bound for scored in remaining) > worth_trying

    def _comparison(self, results: Results, running: Collection[Candidate]) -> Candidate | None:
        """The best settings with the libraries' own way, unless that was tried or does not fit."""
        ran = _ran(results)
        if not ran or self.objective == "memory":  # what a rule settles never needs more
            return None
        best = min(ran, key=self._value).candidate
        plain = self.space.without_rules(best)
        tried = {result.candidate for result in results} | set(running)
        tried |= {candidate for prior in self.priors(results) for candidate, _ in prior.residuals}
        if plain == best or any(self.space.without_rules(each) == each for each in tried):
            return None
        cost = self._calibrate(results)
        prediction = cost.predict(plain)
        fits = memory_upper_bound(prediction) < self._memory_limit(results, cost)
        fits_host = prediction.host_memory_bytes <= _host_memory_limit(results, cost)
        return plain if fits and fits_host else None

    def find_doubtful(self, results: Results) -> TrialResult | None:
        """Find the result that others make least likely, if it would have won: it may be noise."""
        running = [r for r in _ran(results) if r.median_step_seconds and not r.confirms]
        if self.objective != "throughput" or len(running) < MIN_WITNESSES:
            return None
        best, doubts = best_seconds(results), []
        for result in running:
            others = [other for other in results if other.candidate != result.candidate]
            expected = self._calibrate(others).single_process().predict(result.candidate)
            ratio = (result.median_step_seconds or 0.0) / expected.step_seconds
            sigma = math.hypot(expected.time_uncertainty, NOISE["time"])
            would_win = expected.step_seconds < (1 - MIN_GAIN) * best
            if would_win and math.log(ratio) > DOUBT_SIGMAS * sigma:
                doubts.append((ratio, result))
        return max(doubts, key=lambda doubt: doubt[0])[1] if doubts else None

    def is_overconfident(self, results: Results) -> bool:
        """Tell if predictions from earlier results had squared errors beyond their variance."""
        squares = [error / variance for error, variance in prediction_errors(self.cost, results)]
        return bool(squares) and statistics.fmean(squares) > 1

    def _best(self, results: Results) -> float:
        return math.log(min(map(self._value, _ran(results))))

    def _value(self, result: TrialResult) -> float:
        if self.objective == "memory":
            return result.peak_memory_bytes or math.inf
        return result.median_step_seconds or math.inf

    def _within_reach(
        self, best: ScoredCandidate, remaining: Sequence[ScoredCandidate], results: Results
    ) -> ScoredCandidate:
        """`best`, else the largest that is not much larger than what ran, else the smallest."""
        cost = self._calibrate(results)
        largest = max(_required_bytes(result, cost) for result in _ran(results))
        reach = max(MAX_GROWTH * largest, SAFE_SHARE * self.budget_bytes)
        if best.required_bytes <= reach:
            return best
        nearer = [scored for scored in remaining if scored.required_bytes <= reach]
        if nearer:
            return max(nearer, key=lambda scored: scored.required_bytes)
        return min(remaining, key=lambda scored: scored.required_bytes)

    def _memory_limit(self, results: Results, cost: CostModel) -> float:
        """The budget or, once something ran out, halfway between what ran and what did not."""
        # One that was measured beyond the budget has corrected the predictions instead.
        ran_out = [each for each in results if each.outcome in ("oom", "spill")]
        unknown = [x for x in ran_out if x.outcome == "spill" or x.peak_memory_bytes is None]
        too_large = [_required_bytes(result, cost) for result in unknown]
        if not too_large:
            return self.budget_bytes
        if not (ran := [_required_bytes(result, cost) for result in _ran(results)]):
            return min(self.budget_bytes, CLEARLY_LESS * min(too_large))
        return min(self.budget_bytes, (max(ran) + min(too_large)) / 2)


def _host_memory_limit(results: Results, cost: CostModel) -> float:
    """The least predicted for a trial that ran out: other programs may have taken some."""
    ran_out = (result.candidate for result in results if result.outcome == "host_oom")
    return min((cost.predict(each).host_memory_bytes for each in ran_out), default=math.inf)


def _required_bytes(result: TrialResult, cost: CostModel) -> float:
    return memory_upper_bound(cost.predict(result.candidate))


def _without_swap(candidate: Candidate) -> tuple[object, ...]:
    return tuple(value for name, value in candidate if name != "swapped_blocks")


def _taught_by(candidate: Candidate) -> tuple[str, str, int]:
    return candidate.quantization, candidate.attention, candidate.micro_batch_size


def memory_upper_bound(prediction: Prediction) -> float:
    """Bound the bytes of a run's largest phase; only the training step is uncertain."""
    caution = math.exp(CAUTION_SIGMAS * prediction.memory_uncertainty)
    return max(
        each.run_memory_bytes * (caution if each.name == "train" else 1)
        for each in prediction.phases
    )
