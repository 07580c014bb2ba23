"""Runs the search: an Optuna study that any number of workers share through one storage, until
nothing is worth trying.

The objective is a real trial; the sampler asks the residual search. Trial numbers are tickets: a
storage gives them out one by one, and a worker chooses only after all lower numbers have chosen,
seeing what they took, so nothing is measured twice, without a lock. A trial that failed belonged to
a worker that died or stopped (trials themselves never fail: an out-of-memory result is a completed
one with a violated constraint), and whoever draws the next ticket takes its candidate over.
"""

import json
import math
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.schema import Candidate, TrialResult, digest_of
from autotune.search.residual import ResidualSearch, best_seconds

TrialFunction = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps."""

SHARE_OF_RUN = 0.05
"""Share of the planned run's time that a search may take by default."""
MIN_SECONDS = 60.0
MIN_TRIALS = 7
"""With 6, two of nine searches in the development table stopped before they came within 5% (see
benchmarks/DECISIONS.md).
"""
MIN_TRIALS_WITH_PRIORS = 4
"""The same if records of similar machines hold."""
NUM_EXTRA_TRIALS = 2
"""Trials on top of `MIN_TRIALS` if predictions were overconfident: 8, 9 and 10 in all were tried
(see the log).
"""
POLL_SECONDS = 0.5
"""Between looks at what other workers do."""

RESULT = "result"
"""Trial attribute: the TrialResult as JSON."""
CANDIDATE = "candidate"
"""Trial attribute: the Candidate as JSON; present once its worker has chosen."""
STOPPED = "stopped"
"""Trial attribute: its worker ended it, and was not taken down by it."""
OWNER = "owner"
"""Trial attribute: the process that runs it, as `place/process id/start time`."""
OBJECTIVE = "seconds per step"
CONSTRAINT = "failed (0 if it ran)"
MAX_DEATHS = 2
"""Workers that a candidate may take down before it counts as a crash."""
TICKET_SECONDS = 30.0
"""A worker that has not chosen by then is dead: choosing takes well under a second."""
PLAN = "plan"
"""Trial attribute: a plan that a worker proposes; the one with the lowest number is the
search's.
"""


@dataclass(frozen=True)
class StudySnapshot:
    """Where a search stands after its trials up to some number."""

    results: tuple[TrialResult, ...]
    running: tuple[Candidate, ...]
    """Candidates that are being tried."""
    abandoned: tuple[Candidate, ...]
    """Candidates whose workers died or stopped."""
    undecided: tuple[int, ...]
    """Numbers of trials whose workers have not chosen yet."""


def take_snapshot(study: Study, before: int | None = None) -> StudySnapshot:
    """The state of the trials with numbers below `before`, or of all."""
    trials = [t for t in study.get_trials(deepcopy=False) if before is None or t.number < before]
    # A result counts even if its worker died before it could mark the trial as finished.
    results = [
        TrialResult.model_validate_json(t.user_attrs[RESULT])
        for t in trials
        if RESULT in t.user_attrs
    ]
    unfinished = [t for t in trials if t.state == TrialState.RUNNING and RESULT not in t.user_attrs]
    running = [_candidate_of(t) for t in unfinished if CANDIDATE in t.user_attrs]
    failed = [t for t in trials if t.state == TrialState.FAIL and CANDIDATE in t.user_attrs]
    deaths: Counter[Candidate] = Counter()
    for trial in failed:
        deaths[_candidate_of(trial)] += (
            STOPPED not in trial.user_attrs
        )  # a count of 0 is an entry, too
    for known in (*running, *(result.candidate for result in results)):
        deaths.pop(known, None)
    message = f"it took its process down {MAX_DEATHS} times"
    lost = [
        TrialResult(candidate=c, outcome="crash", message=message)
        for c, n in deaths.items()
        if n >= MAX_DEATHS
    ]
    return StudySnapshot(
        results=(*results, *lost),
        running=tuple(running),
        abandoned=tuple(candidate for candidate, count in deaths.items() if count < MAX_DEATHS),
        undecided=tuple(t.number for t in unfinished if CANDIDATE not in t.user_attrs),
    )


def _candidate_of(trial: FrozenTrial) -> Candidate:
    return Candidate.model_validate_json(trial.user_attrs[CANDIDATE])


class ResidualSampler(BaseSampler):
    """Asks the residual search, one worker after the other.

    Args:
        search: chooses what to try next.
        is_over: whether no trial should follow.
    """

    def __init__(self, search: ResidualSearch, is_over: Callable[[StudySnapshot], bool]) -> None:
        self.search, self.is_over = search, is_over

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {
            name: CategoricalDistribution(choices)
            for name, choices in self.search.space.tried_choices.items()
        }

    # Gives nothing when the search is over: the trial then has nothing to do.
    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        snapshot = _wait_for_lower_numbers(study, trial.number)
        if self.is_over(snapshot):
            return {}
        abandoned = next(iter(snapshot.abandoned), None)
        chosen = abandoned or self.search.next_candidate(snapshot.results, snapshot.running)
        return {name: getattr(chosen, name) for name in search_space} if chosen else {}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise RuntimeError(f"{param_name} is not part of the search space")


def _wait_for_lower_numbers(study: Study, number: int) -> StudySnapshot:
    deadline = time.monotonic() + TICKET_SECONDS
    while (snapshot := take_snapshot(study, before=number)).undecided:
        fail_dead_trials(study)
        if time.monotonic() > deadline:  # the worker died before its first heartbeat
            _fail_trials(study, snapshot.undecided)
        time.sleep(0.1)
    return snapshot


def fail_dead_trials(study: Study, *, is_alone: bool = False) -> None:
    """Mark the trials of dead workers as failed: of those without a heartbeat or, on this machine,
    without a process.

    If this process `is_alone` with the study, all others are dead: one may have died before it
    named itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    _fail_trials(
        study, [t.number for t in running if is_alone or _is_dead(t.user_attrs.get(OWNER, ""))]
    )


def _fail_trials(study: Study, numbers: Collection[int]) -> None:
    for number in numbers:
        try:
            study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        except UpdateFinishedTrialError:
            continue  # another worker was quicker


def identify_process() -> str:
    """This process as an `OWNER`, so that others on this machine can tell whether it lives."""
    return f"{_place()}/{os.getpid()}/{psutil.Process().create_time():.1f}"


def _place() -> str:
    """Where process ids mean the same: a host's name, and the namespace in which a container
    counts them.
    """
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}:{namespace.readlink() if namespace.exists() else ''}"


def _is_dead(owner: str) -> bool:
    place, _, process = owner.partition("/")
    if place != _place():
        return False
    number, _, start = process.partition("/")
    try:
        return f"{psutil.Process(int(number)).create_time():.1f}" != start
    except psutil.NoSuchProcess:
        return True


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
    study: Study | None = None,
) -> tuple[TrialResult, ...]:
    """Try candidates until the search is over; without a candidate that is predicted to fit,
    nothing is tried.

    Args:
        search: chooses what to try next.
        run: tries a candidate.
        limits: when to end at the latest.
        on_trial: called with each result, those of an interrupted search first.
        is_enough: ends the search early, e.g. once a record is reproduced.
        study: where results are stored; finished trials in it are not run again. By default in
            memory.

    Returns:
        all results in order, other workers' too.

    Raises:
        NothingFits: energy is the objective, and no trial that ran could tell it.
    """
    remaining = search.remaining(())
    if not remaining:
        return ()
    predicted_seconds = min(scored.step_seconds for scored in remaining)

    def is_over(snapshot: StudySnapshot) -> bool:
        return is_enough(snapshot.results) or _is_over(search, limits, predicted_seconds, snapshot)

    study = study or optuna.create_study()
    study.sampler = ResidualSampler(search, is_over)

    def stop_when_over(study: Study, _: object) -> None:
        if is_over(take_snapshot(study)):
            study.stop()

    fail_dead_trials(study)
    for result in take_snapshot(study).results:
        on_trial(result)
    while True:
        snapshot = take_snapshot(study)
        if not is_over(snapshot):
            try:
                study.optimize(
                    lambda trial: _objective(trial, search, run, on_trial),
                    callbacks=[stop_when_over],
                )
            except UpdateFinishedTrialError:
                continue  # this worker was taken for dead, and another has its candidate now
            except (
                UnboundLocalError
            ) as error:  # of Optuna 5.0, if an interrupt comes while it stores a trial
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise
        elif snapshot.running or snapshot.undecided:
            time.sleep(
                POLL_SECONDS
            )  # if one of the others dies, this worker takes its candidate over
            fail_dead_trials(study)
        else:
            return snapshot.results


def _objective(
    trial: Trial,
    search: ResidualSearch,
    run: TrialFunction,
    on_trial: Callable[[TrialResult], None],
) -> float:
    """Try the candidate that the sampler has chosen, if any, and store the result; gives its
    median step seconds.
    """
    trial.set_user_attr(OWNER, identify_process())
    if not trial.relative_params:
        trial.study.stop()
        raise optuna.TrialPruned("the search was over")
    values = {
        name: trial.suggest_categorical(name, choices)
        for name, choices in search.space.tried_choices.items()
    }
    candidate = Candidate.model_validate(values)
    trial.set_user_attr(CANDIDATE, _json(candidate))
    try:
        result = run(candidate)
    except (
        BaseException
    ):  # interrupted, or the device is not available: it says nothing about the candidate
        trial.set_user_attr(STOPPED, True)
        raise
    trial.set_user_attr(RESULT, _json(result))
    for name, value in describe_result(result).items():
        trial.set_user_attr(name, value)
    failed = 0.0 if result.outcome == "ok" else 1.0
    trial.set_constraint(CONSTRAINT, failed)
    # optuna-dashboard 0.21 looks for constraints only where Optuna 4 stored them, which Optuna 5
    # reads, too.
    trial.storage.set_trial_system_attr(trial._trial_id, "constraints", [failed])
    on_trial(result)
    return result.median_step_seconds or math.inf


def describe_result(result: TrialResult) -> dict[str, str | float]:
    """What a person who opens the study in a dashboard reads of a trial."""
    told: dict[str, str | float | None] = {
        "settings": result.candidate.label(),
        "outcome": result.outcome,
        "why": result.message or None,
        "step memory GiB": result.peak_memory_bytes and round(result.peak_memory_bytes / 2**30, 3),
        "joules per image": result.joules_per_image and round(result.joules_per_image, 3),
        "seconds of trial": result.wall_seconds and round(result.wall_seconds, 1),
    }
    return {name: value for name, value in told.items() if value is not None}


def _is_over(
    search: ResidualSearch, limits: SearchLimits, predicted_seconds: float, snapshot: StudySnapshot
) -> bool:
    results, num_trials = snapshot.results, len(snapshot.results) + len(snapshot.running)
    search.require_told(results)
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
    study: Study,
    what: str,
    candidate: Candidate,
    measure: Callable[[Candidate], TrialResult | None],
) -> TrialResult | None:
    """What `measure` finds about the candidate, stored as `what`: a search that was interrupted
    reads it there.
    """
    digest = digest_of(candidate.model_dump(mode="json")).removeprefix("sha256:")
    key = f"{what} {digest[:16]}"
    stored = study.user_attrs.get(key)
    if stored is not None:
        return TrialResult.model_validate_json(stored)
    found = measure(candidate)
    if found is not None:
        study.set_user_attr(key, _json(found))
    return found


def _json(stored: Candidate | TrialResult) -> str:
    """With spaces: a dashboard would else draw it as one word, wider than the window."""
    return json.dumps(stored.model_dump(mode="json"))


def published_plan(study: Study) -> str | None:
    """The plan that this search ended in, as JSON; None before."""
    proposals = (trial.user_attrs.get(PLAN) for trial in study.get_trials(deepcopy=False))
    return next((text for text in proposals if text is not None), None)


def publish_plan(study: Study, plan: str) -> str:
    """Propose a plan, and return the one that the search ended in: the first that any worker
    proposed.
    """
    if published_plan(study) is None:
        study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs={PLAN: plan}))
    return published_plan(study) or plan
