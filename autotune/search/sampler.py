"""The residual search as an Optuna sampler that any number of workers share through one storage.

Trial numbers are tickets. A storage gives them out one by one, and a worker chooses only after all lower numbers have
chosen, seeing what they took: so nothing is measured twice, without a lock. A trial that failed belonged to a worker
that died or stopped (trials themselves never fail: an out-of-memory result is a completed one with a violated
constraint), and whoever draws the next ticket takes its candidate over.
"""

import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.schema import Candidate, TrialResult
from autotune.search.residual import ResidualSearch

RESULT = "result"
"""Trial attribute: the TrialResult as JSON."""
CANDIDATE = "candidate"
"""Trial attribute: the Candidate as JSON; present once its worker has chosen."""
STOPPED = "stopped"
"""Trial attribute: its worker ended it, and was not taken down by it."""
OWNER = "owner"
"""Trial attribute: the process that runs it, as `place/process id/start time`."""
MAX_DEATHS = 2
"""Workers that a candidate may take down before it counts as a crash."""
TICKET_SECONDS = 30.0
"""A worker that has not chosen by then is dead: choosing takes well under a second."""


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
    results = [TrialResult.model_validate_json(t.user_attrs[RESULT]) for t in trials if RESULT in t.user_attrs]
    unfinished = [t for t in trials if t.state == TrialState.RUNNING and RESULT not in t.user_attrs]
    running = [_candidate_of(t) for t in unfinished if CANDIDATE in t.user_attrs]
    failed = [t for t in trials if t.state == TrialState.FAIL and CANDIDATE in t.user_attrs]
    deaths: Counter[Candidate] = Counter()
    for trial in failed:
        deaths[_candidate_of(trial)] += STOPPED not in trial.user_attrs  # a count of 0 is an entry, too
    for known in (*running, *(result.candidate for result in results)):
        deaths.pop(known, None)
    message = f"it took its process down {MAX_DEATHS} times"
    lost = [TrialResult(candidate=c, outcome="crash", message=message) for c, n in deaths.items() if n >= MAX_DEATHS]
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

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: CategoricalDistribution(choices) for name, choices in self.search.space.choices.items()}

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
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
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
    """Mark the trials of dead workers as failed: of those without a heartbeat or, on this machine, without a process.

    If this process `is_alone` with the study, all others are dead: one may have died before it named itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    _fail_trials(study, [t.number for t in running if is_alone or _is_dead(t.user_attrs.get(OWNER, ""))])


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
    """Where process ids mean the same: a host's name, and the namespace in which a container counts them."""
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
