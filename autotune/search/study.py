"""Runs the search as an Optuna study, which any number of workers share through one storage.

The objective is a real trial; the sampler asks the residual search. A trial's parameters are its
candidate, so Optuna's own heartbeats and retries see to it that what a dead worker tried is tried
again. Trials themselves never fail: one that ran out of memory is complete, with a violated
constraint. A database's password stays in its URL: no message, log or plan ever holds it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from autotune.errors import AutotuneError, InvalidInput, NothingFits
from autotune.plan.base import digest_of
from autotune.plan.candidate import Candidate, TrialResult
from autotune.search.next import ResidualSearch, SearchLimits
from autotune.system.files import ESCAPE_CHARACTERS, quote_error

TrialFunction = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps."""

POLL_SECONDS = 0.5
"""Between looks at what other workers do."""
HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 30
"""A worker without a heartbeat for so long is dead."""
MAX_RETRIES = 1
"""Times that a candidate is tried again after it took its worker down; then it is a crash."""
CONNECT_SECONDS = 10
"""A server that does not answer within so long is away; by default TCP tries for two minutes."""
MAX_ATTEMPTS = 5
"""Workers that create a database's tables at the same moment get into each other's way."""

BEGAN, RESULT, STOPPED, PLAN = "began", "result", "stopped", "plan"
"""Trial attributes: the number of the trial that began (a retry has that of the one before); a
result; that a worker ended a trial, and was not taken down by it; a plan that a worker proposes."""
IDENTITY, ENDED = "identity", "ended"
"""Study attributes: what is searched for, and on what; that nothing ran, so there is no plan."""


@contextmanager
def open_study(
    url: str | None,
    name: str,
    identity: Mapping[str, str | None],
    follows: bool = False,
    is_fresh: bool = False,
) -> Iterator[Study]:
    """The study in a storage, new or as other workers left it; in memory without a storage.
    `identity` names all that must be equal for results to count. With `follows`, a study that is
    over is followed by a new one; with `is_fresh`, one that is not is, too.

    Raises:
        InvalidInput: the URL cannot be used, or the study has another identity.
        AutotuneError: the storage failed.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None:
        yield optuna.create_study()
        return
    with _translate_errors(url):
        storage = _connect(url)
        if follows:
            names = [one for one in optuna.get_all_study_names(storage) if one.startswith(name)]
            last = f"{name} {max(1, len(names))}"
            study = optuna.create_study(storage=storage, study_name=last, load_if_exists=True)
            is_over = ENDED in study.user_attrs or published_plan(study) is not None
            name = f"{name} {len(names) + 1}" if is_over or (is_fresh and study.trials) else last
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        take_snapshot(study)  # raises if its results are damaged
        stored = study.user_attrs.get(IDENTITY) or identity
        differing = [
            f"{key}: {stored.get(key)} there, {here} here"
            for key, here in identity.items()
            if stored.get(key) != here
        ]
        if differing:
            raise InvalidInput(
                f"the search {name!r} is for another request or machine; {'; '.join(differing)}",
                hint="workers of one search need equal machines and requests; name another --study",
            )
        study.set_user_attr(IDENTITY, dict(identity))
    with _translate_errors(url, "results of finished trials are kept; "):
        try:
            yield study
        except NothingFits:
            study.set_user_attr(ENDED, True)  # there may be more memory next time
            raise


def check_storage(url: str) -> None:
    """Connect to the storage and leave it as it is, so that one that cannot be used is told before
    long work. Raises what `open_study` does."""
    with _translate_errors(url):
        _connect(url)


class _Storage(RDBStorage):
    def record_heartbeat(self, trial_id: int) -> None:
        """In a thread of its own, where nobody could handle a failure: the next may succeed."""
        with suppress(StorageInternalError):
            super().record_heartbeat(trial_id)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """What has begun has a heartbeat: for Optuna, a trial without one never ends."""
        if key == BEGAN:
            super().record_heartbeat(trial_id)
        super().set_trial_user_attr(trial_id, key, value)


def _connect(url: str) -> RDBStorage:
    warnings.simplefilter("ignore", ExperimentalWarning)  # Optuna's heartbeats are, for years
    connect = {"timeout": 60} if url.startswith("sqlite:") else {}
    connect |= {"connect_timeout": CONNECT_SECONDS} if url.startswith(("postgres", "mysql")) else {}
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return _Storage(
                url,
                {"connect_args": connect, "pool_pre_ping": True, "hide_parameters": True},
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(MAX_RETRIES),
            )
        # No such driver, no such URL, a port that is no number, tables of another Optuna.
        except (ImportError, ArgumentError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                f"cannot use the storage: {quote_error(error, url)}",
                hint="write it like postgresql+psycopg://user:password@host/database, after "
                f"pip install 'lora-autotune[postgres]'; {ESCAPE_CHARACTERS}",
            ) from None
        except SQLAlchemyError as error:
            if attempt == MAX_ATTEMPTS or "exist" not in str(error).lower():
                raise
            time.sleep(0.3 * attempt)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _translate_errors(url: str, kept: str = "") -> Iterator[None]:
    """Turn the storage's errors into ours, without the password."""
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        failure: BaseException | None = error  # Optuna raises others if it cannot store an end
        while not isinstance(failure, SQLAlchemyError | StorageInternalError | None):
            failure = failure.__cause__ or failure.__context__
        if failure is None:
            raise
        while failure.__cause__ is not None:  # the outer errors say it in SQL
            failure = failure.__cause__
        raise AutotuneError(
            f"the storage of the search failed: {quote_error(failure, url)}",
            hint=f"{kept}run the same command again once the storage can be reached. "
            "If its file is damaged, name another --study",
        ) from None  # the chain would show what was left out


@dataclass(frozen=True)
class StudySnapshot:
    """The state of all trials."""

    results: tuple[TrialResult, ...]
    running: tuple[Candidate, ...]
    """Candidates that are being tried."""
    has_waiting: bool
    """Whether candidates of workers that died wait to be tried again."""


def take_snapshot(study: Study) -> StudySnapshot:
    """Return where a search stands."""
    results: dict[Candidate, TrialResult] = {}
    running, crashed, has_waiting = [], [], False
    for trial in study.get_trials(deepcopy=False):
        has_waiting |= trial.state == TrialState.WAITING
        # A result counts even if its worker died before it could mark the trial as finished.
        if (text := trial.user_attrs.get(RESULT)) is not None:
            result = TrialResult.model_validate_json(text)
            results.setdefault(result.candidate, result)
        elif len(trial.params) == len(Candidate.model_fields):  # all of them are stored
            retries = RetryHeartbeatStaleTrialCallback.retry_history(trial)
            if _is_running(trial):
                running.append(Candidate.model_validate(trial.params))
            elif trial.state == TrialState.FAIL and retries and STOPPED not in trial.user_attrs:
                crashed.append(Candidate.model_validate(trial.params))
    message = f"it took its process down {MAX_RETRIES + 1} times"
    for each in crashed:
        results.setdefault(each, TrialResult(candidate=each, outcome="crash", message=message))
    left = tuple(candidate for candidate in running if candidate not in results)
    return StudySnapshot(tuple(results.values()), left, has_waiting)


def _is_running(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.RUNNING and trial.user_attrs.get(BEGAN) == trial.number


class ResidualSampler(BaseSampler):
    """Asks the residual search."""

    def __init__(self, search: ResidualSearch, is_over: Callable[[StudySnapshot], bool]) -> None:
        self.search, self.is_over = search, is_over

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        choices = self.search.space.tried_choices
        return {name: CategoricalDistribution(values) for name, values in choices.items()}

    # Gives nothing when the search is over: the trial then has nothing to do.
    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        snapshot = take_snapshot(study)
        if self.is_over(snapshot):
            return {}
        chosen = self.search.next_candidate(snapshot.results, snapshot.running)
        return {name: getattr(chosen, name) for name in search_space} if chosen else {}

    def sample_independent(self, *asked: object, **named: object) -> Any:
        raise RuntimeError("every knob is sampled relatively")


def run_search(
    search: ResidualSearch,
    run: TrialFunction,
    limits: SearchLimits,
    on_trial: Callable[[TrialResult], None],
    *,
    is_enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False,
    study: Study | None = None,
) -> tuple[TrialResult, ...]:
    """Try candidates until the search is over, or `is_enough`; return all results in order, other
    workers' too.

    Finished trials of the study (by default one in memory) are not run again; `on_trial` is called
    with them first. Without a candidate that is predicted to fit, nothing is tried.
    """
    if not search.remaining(()):
        return ()

    def is_over(snapshot: StudySnapshot) -> bool:
        return is_enough(snapshot.results) or search.is_over(
            limits, snapshot.results, snapshot.running, snapshot.has_waiting
        )

    study = study or optuna.create_study()
    study.sampler = ResidualSampler(search, is_over)
    warnings.simplefilter("ignore", ExperimentalWarning)
    fail_stale_trials(study)
    for result in take_snapshot(study).results:
        on_trial(result)
    while True:
        snapshot = take_snapshot(study)
        if not is_over(snapshot):
            # Taken for dead, a worker cannot end its trial, which another one has by now.
            with suppress(UpdateFinishedTrialError):
                study.optimize(lambda trial: _objective(trial, search, run, on_trial), n_trials=1)
        elif snapshot.running:
            time.sleep(POLL_SECONDS)
            fail_stale_trials(study)  # if one of the others dies, this worker tries its candidate
        else:
            return snapshot.results


def _objective(
    trial: Trial,
    search: ResidualSearch,
    run: TrialFunction,
    on_trial: Callable[[TrialResult], None],
) -> float:
    """Try the candidate that the sampler has chosen, or a dead worker's, and store the result;
    gives its median step seconds."""
    if not trial.params and not trial.relative_params:
        raise optuna.TrialPruned("the search was over")
    trial.set_user_attr(BEGAN, trial.number)
    choices = search.space.tried_choices
    candidate = Candidate.model_validate(
        {name: trial.suggest_categorical(name, values) for name, values in choices.items()}
    )
    for other in trial.study.get_trials(deepcopy=False):
        is_alive = _is_running(other) or other.state == TrialState.COMPLETE
        if other.number < trial.number and is_alive and other.params == trial.params:
            raise optuna.TrialPruned("another worker chose the same at the same moment")
    if (stored := trial.user_attrs.get(RESULT)) is not None:  # its worker died just afterwards
        result = TrialResult.model_validate_json(stored)
    else:
        try:
            result = run(candidate)
        except BaseException:  # interrupted: it says nothing about the candidate
            trial.set_user_attr(STOPPED, True)
            raise
        trial.set_user_attr(RESULT, result.model_dump_json())
        on_trial(result)
    trial.set_constraint("failed (0 if it ran)", 0.0 if result.outcome == "ok" else 1.0)
    return result.median_step_seconds or math.inf


def memoize(
    study: Study,
    what: str,
    candidate: Candidate,
    measure: Callable[[Candidate], TrialResult | None],
) -> TrialResult | None:
    """What `measure` finds about the candidate, stored as `what`: a search that was interrupted
    reads it there."""
    key = f"{what} {digest_of(candidate.model_dump(mode='json'))[-16:]}"
    if (stored := study.user_attrs.get(key)) is not None:
        return TrialResult.model_validate_json(stored)
    found = measure(candidate)
    if found is not None:
        study.set_user_attr(key, found.model_dump_json())
    return found


def published_plan(study: Study) -> str | None:
    """The plan that this search ended in, as JSON; None before."""
    proposals = (trial.user_attrs.get(PLAN) for trial in study.get_trials(deepcopy=False))
    return next((text for text in proposals if text is not None), None)


def publish_plan(study: Study, plan: str) -> str:
    """Propose a plan, and return the one that the search ended in: the first that any worker
    proposed. Trials are numbered one by one, so no two can be the first."""
    if published_plan(study) is None:
        study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs={PLAN: plan}))
    return published_plan(study) or plan
