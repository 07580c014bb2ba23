"""Runs the search: an Optuna study whose objective is a real trial, until nothing worth trying is left."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState, create_trial

from autotune.schema import Candidate, TrialResult, digest_of
from autotune.search.residual import ResidualSearch, best_seconds
from autotune.search.sampler import (
    CANDIDATE,
    OWNER,
    RESULT,
    STOPPED,
    ResidualSampler,
    StudySnapshot,
    fail_dead_trials,
    identify_process,
    take_snapshot,
)

TrialFunction = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps."""

PLAN = "plan"
"""Trial attribute: a plan that a worker proposes; the one with the lowest number is the search's."""
SHARE_OF_RUN = 0.05
"""Share of the planned run's time that a search may take by default."""
MIN_SECONDS = 60.0
MIN_TRIALS = 6
MIN_TRIALS_WITH_PRIORS = 4
"""The same if records of similar machines hold."""
NUM_EXTRA_TRIALS = 3
"""Trials on top of `MIN_TRIALS` if predictions were overconfident; 2, 3 and 4 were tried (see benchmarks/LOG.md)."""
POLL_SECONDS = 0.5
"""Between looks at what other workers do."""


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends at the latest."""

    max_trials: int
    max_seconds: float | None = None
    """Seconds of trials, all workers' together; None for a share of the run, at least a minute."""
    num_steps: int = 1
    """Steps of the planned run."""

    def allowed_seconds(self, step_seconds: float) -> float:
        """Seconds of trials for a run whose steps take `step_seconds`."""
        if self.max_seconds is not None:
            return self.max_seconds
        return max(MIN_SECONDS, SHARE_OF_RUN * self.num_steps * step_seconds)


def search_cost_seconds(results: Sequence[TrialResult]) -> float:
    """What trials took, loading included."""
    return math.fsum(result.wall_seconds or 0.0 for result in results)


def run_search(
    search: ResidualSearch,
    run: TrialFunction,
    limits: SearchLimits,
    on_trial: Callable[[TrialResult], None],
    *,
    is_enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False,
    study: optuna.Study | None = None,
) -> tuple[TrialResult, ...]:
    """Try candidates until the search is over; without a candidate that is predicted to fit, nothing is tried.

    Args:
        search: chooses what to try next.
        run: tries a candidate.
        limits: when to end at the latest.
        on_trial: called with each result, those of an interrupted search first.
        is_enough: ends the search early, e.g. once a record is reproduced.
        study: where results are stored; finished trials in it are not run again. By default in memory.

    Returns:
        all results in order, other workers' too.
    """
    remaining = search.remaining(())
    if not remaining:
        return ()
    predicted_seconds = min(scored.step_seconds for scored in remaining)

    def is_over(snapshot: StudySnapshot) -> bool:
        return is_enough(snapshot.results) or _is_over(search, limits, predicted_seconds, snapshot)

    study = study or optuna.create_study()
    study.sampler = ResidualSampler(search, is_over)

    def stop_when_over(study: optuna.Study, _: object) -> None:
        if is_over(take_snapshot(study)):
            study.stop()

    fail_dead_trials(study)
    for result in take_snapshot(study).results:
        on_trial(result)
    while True:
        snapshot = take_snapshot(study)
        if not is_over(snapshot):
            try:
                study.optimize(lambda trial: _objective(trial, search, run, on_trial), callbacks=[stop_when_over])
            except UpdateFinishedTrialError:
                continue  # this worker was taken for dead, and another has its candidate now
        elif snapshot.running or snapshot.undecided:
            time.sleep(POLL_SECONDS)  # if one of the others dies, this worker takes its candidate over
            fail_dead_trials(study)
        else:
            return snapshot.results


def _objective(
    trial: Trial, search: ResidualSearch, run: TrialFunction, on_trial: Callable[[TrialResult], None]
) -> float:
    """Try the candidate that the sampler has chosen, if any, and store the result; gives its median step seconds."""
    trial.set_user_attr(OWNER, identify_process())
    if not trial.relative_params:
        trial.study.stop()
        raise optuna.TrialPruned("the search was over")
    values = {name: trial.suggest_categorical(name, choices) for name, choices in search.space.choices.items()}
    candidate = Candidate.model_validate(values)
    trial.set_user_attr(CANDIDATE, candidate.model_dump_json())
    try:
        result = run(candidate)
    except BaseException:  # interrupted, or the device is not available: it says nothing about the candidate
        trial.set_user_attr(STOPPED, True)
        raise
    trial.set_user_attr(RESULT, result.model_dump_json())
    trial.set_constraint("runs", 0.0 if result.outcome == "ok" else 1.0)
    on_trial(result)
    return result.median_step_seconds or math.inf


def _is_over(search: ResidualSearch, limits: SearchLimits, predicted_seconds: float, snapshot: StudySnapshot) -> bool:
    results, num_trials = snapshot.results, len(snapshot.results) + len(snapshot.running)
    best = best_seconds(results)
    allowed = limits.allowed_seconds(predicted_seconds if math.isinf(best) else best)
    if num_trials >= limits.max_trials or (results and search_cost_seconds(results) >= allowed):
        return True
    if snapshot.abandoned:
        return False
    if search.priors(results):
        min_trials = MIN_TRIALS_WITH_PRIORS
    else:
        min_trials = MIN_TRIALS + (NUM_EXTRA_TRIALS if search.is_overconfident(results) else 0)
    if num_trials < min_trials or math.isinf(best):
        return not search.remaining(results, snapshot.running)
    return search.has_converged(results, snapshot.running)


def memoize(
    study: optuna.Study, what: str, candidate: Candidate, measure: Callable[[Candidate], TrialResult | None]
) -> TrialResult | None:
    """What `measure` finds about the candidate, stored as `what`: a search that was interrupted reads it there."""
    key = f"{what}:{digest_of(candidate.model_dump(mode='json'))}"
    stored = study.user_attrs.get(key)
    if stored is not None:
        return TrialResult.model_validate_json(stored)
    found = measure(candidate)
    if found is not None:
        study.set_user_attr(key, found.model_dump_json())
    return found


def published_plan(study: optuna.Study) -> str | None:
    """The plan that this search ended in, as JSON; None before."""
    proposals = (trial.user_attrs.get(PLAN) for trial in study.get_trials(deepcopy=False))
    return next((text for text in proposals if text is not None), None)


def publish_plan(study: optuna.Study, plan: str) -> str:
    """Propose a plan, and return the one that the search ended in: the first that any worker proposed."""
    if published_plan(study) is None:
        study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs={PLAN: plan}))
    return published_plan(study) or plan
