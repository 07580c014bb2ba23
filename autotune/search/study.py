"""Runs the search: an Optuna study whose objective is a real trial, until nothing worth trying is left."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import Trial

from autotune.schema import Candidate, TrialResult
from autotune.search.sampler import RESULT, ResidualSampler, best_seconds, results_of
from autotune.search.space import SearchSpace

WORTHWHILE_GAIN = 0.03
"""The search stops when the best remaining candidate is not expected to save more than this share of a step."""


@dataclass(frozen=True)
class Limits:
    """When a search ends at the latest, and how many trials it makes at least."""

    max_trials: int
    max_seconds: float
    min_trials: int = 6


def run_search(
    space: SearchSpace,
    sampler: ResidualSampler,
    run: Callable[[Candidate], TrialResult],
    limits: Limits,
    on_trial: Callable[[TrialResult], None],
    *,
    first: Sequence[Candidate] = (),
    enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False,
) -> tuple[TrialResult, ...]:
    """Try candidates one after the other and return what happened, in order.

    Args:
        first: tried before the sampler is asked, e.g. what won elsewhere.
        enough: ends the search early, e.g. once a promise is confirmed.

    An out-of-memory trial is a completed one with a violated constraint: it teaches, it does not end the search.
    Without a candidate that is predicted to fit, nothing is tried.
    """
    if not sampler.outlooks(()):
        return ()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    for candidate in first:
        study.enqueue_trial({name: getattr(candidate, name) for name in space.choices})
    started = time.monotonic()

    def objective(trial: Trial) -> float:
        values = {name: trial.suggest_categorical(name, choices) for name, choices in space.choices.items()}
        result = run(Candidate.model_validate(values))
        trial.set_user_attr(RESULT, result.model_dump_json())
        trial.set_constraint("runs", 0.0 if result.outcome == "ok" else 1.0)
        on_trial(result)
        return result.median_step_seconds or math.inf

    def stop_when_done(study: optuna.Study, _: object) -> None:
        results = results_of(study)
        late = time.monotonic() - started >= limits.max_seconds
        if late or enough(results) or len(results) >= limits.max_trials or _nothing_to_gain(sampler, results, limits):
            study.stop()

    study.optimize(objective, n_trials=limits.max_trials, callbacks=[stop_when_done])
    return tuple(results_of(study))


def _nothing_to_gain(sampler: ResidualSampler, results: Sequence[TrialResult], limits: Limits) -> bool:
    remaining = sampler.outlooks(results)
    if not remaining:
        return True
    best = best_seconds(results)
    if len(results) < limits.min_trials or math.isinf(best):
        return False
    return min(outlook.hope for outlook in remaining) > math.log(best) + math.log1p(-WORTHWHILE_GAIN)
