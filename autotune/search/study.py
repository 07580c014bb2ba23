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
    owner_here,
    release_dead,
    take_snapshot,
)

Run = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps, and says what that cost."""

PLAN = "plan"
"""Trial attribute: a plan that a worker proposes; the one with the lowest number is the search's."""
SHARE_OF_RUN = 0.05
"""Of the planned run's time that a search may take where nothing else is said."""
LEAST_SECONDS = 60.0
MIN_TRIALS = 6
MIN_TRIALS_TAUGHT = 4
"""The same where a similar machine's lessons hold."""
MORE_TRIALS = 3
"""On top of `MIN_TRIALS` where trials were not what was predicted; 2, 3 and 4 were tried (see the log)."""
POLL_SECONDS = 0.5
"""Between looks at what other workers do."""


@dataclass(frozen=True)
class Limits:
    """When a search ends at the latest."""

    max_trials: int
    max_seconds: float | None = None
    """Of trials, all workers' together; None for a share of the run, at least a minute."""
    num_steps: int = 1
    """Of the run."""

    def allowed_seconds(self, step_seconds: float) -> float:
        """Where a step of the run takes `step_seconds`."""
        if self.max_seconds is not None:
            return self.max_seconds
        return max(LEAST_SECONDS, SHARE_OF_RUN * self.num_steps * step_seconds)


def search_cost_seconds(results: Sequence[TrialResult]) -> float:
    """What trials took, loading included."""
    return math.fsum(result.wall_seconds or 0.0 for result in results)


def run_search(
    search: ResidualSearch,
    run: Run,
    limits: Limits,
    on_trial: Callable[[TrialResult], None],
    *,
    enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False,
    study: optuna.Study | None = None,
) -> tuple[TrialResult, ...]:
    """Try candidates until it is over, and return what happened, in order; other workers' trials too.

    Args:
        enough: ends the search early, e.g. once a promise is confirmed.
        study: where results are kept; finished trials in it are not run again. By default in memory.

    Without a candidate that is predicted to fit, nothing is tried.
    """
    outlooks = search.outlooks(())
    if not outlooks:
        return ()
    predicted = min(outlook.step_seconds for outlook in outlooks)

    def is_over(snapshot: StudySnapshot) -> bool:
        return enough(snapshot.results) or _is_over(search, limits, predicted, snapshot)

    study = study or optuna.create_study()
    study.sampler = ResidualSampler(search, is_over)

    def stop_when_over(study: optuna.Study, _: object) -> None:
        if is_over(take_snapshot(study)):
            study.stop()

    release_dead(study)
    for result in take_snapshot(study).results:
        on_trial(result)
    while True:
        snapshot = take_snapshot(study)
        if not is_over(snapshot):
            try:
                study.optimize(lambda trial: _tried(trial, search, run, on_trial), callbacks=[stop_when_over])
            except UpdateFinishedTrialError:
                continue  # this worker was given up for dead, and another has taken its candidate over
        elif snapshot.taken or snapshot.undecided:
            time.sleep(POLL_SECONDS)  # should one of the others die, its candidate is ours
            release_dead(study)
        else:
            return snapshot.results


def _tried(trial: Trial, search: ResidualSearch, run: Run, on_trial: Callable[[TrialResult], None]) -> float:
    """The study's objective: the trial that the sampler has chosen, if any; its result goes into the storage."""
    trial.set_user_attr(OWNER, owner_here())
    if not trial.relative_params:
        trial.study.stop()
        raise optuna.TrialPruned("the search was over")
    values = {name: trial.suggest_categorical(name, choices) for name, choices in search.space.choices.items()}
    candidate = Candidate.model_validate(values)
    trial.set_user_attr(CANDIDATE, candidate.model_dump_json())
    try:
        result = run(candidate)
    except BaseException:  # interrupted, or the device is not to be had: the candidate did nothing
        trial.set_user_attr(STOPPED, True)
        raise
    trial.set_user_attr(RESULT, result.model_dump_json())
    trial.set_constraint("runs", 0.0 if result.outcome == "ok" else 1.0)
    on_trial(result)
    return result.median_step_seconds or math.inf


def _is_over(search: ResidualSearch, limits: Limits, predicted_seconds: float, snapshot: StudySnapshot) -> bool:
    results, count = snapshot.results, len(snapshot.results) + len(snapshot.taken)
    best = best_seconds(results)
    allowed = limits.allowed_seconds(predicted_seconds if math.isinf(best) else best)
    if count >= limits.max_trials or (results and search_cost_seconds(results) >= allowed):
        return True
    if snapshot.abandoned:
        return False
    if search.priors(results):
        least = MIN_TRIALS_TAUGHT
    else:
        least = MIN_TRIALS + (MORE_TRIALS if search.is_surprised(results) else 0)
    if count < least or math.isinf(best):
        return not search.outlooks(results, snapshot.taken)
    return search.nothing_to_gain(results, snapshot.taken)


def frozen_plan(study: optuna.Study) -> str | None:
    """The plan that this search ended in, None before."""
    proposals = (trial.user_attrs.get(PLAN) for trial in study.get_trials(deepcopy=False))
    return next((text for text in proposals if text is not None), None)


def memoize(
    study: optuna.Study, what: str, candidate: Candidate, measure: Callable[[Candidate], TrialResult | None]
) -> TrialResult | None:
    """What `measure` finds about the candidate, kept as `what`: a search that was interrupted does not ask again."""
    key = f"{what}:{digest_of(candidate.model_dump(mode='json'))}"
    known = study.user_attrs.get(key)
    if known is not None:
        return TrialResult.model_validate_json(known)
    found = measure(candidate)
    if found is not None:
        study.set_user_attr(key, found.model_dump_json())
    return found


def publish_plan(study: optuna.Study, plan: str) -> str:
    """Propose a plan, and return the one that the search ended in: the first that any worker proposed."""
    if frozen_plan(study) is None:
        study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs={PLAN: plan}))
    return frozen_plan(study) or plan
