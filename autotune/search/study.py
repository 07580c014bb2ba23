"""Runs the search as an Optuna study, which any number of workers share through one storage.

A trial's parameters are its candidate, so Optuna's own heartbeats and retries see to it that what a
dead worker tried is tried again. Trials themselves never fail: one that ran out of memory is
complete, with a violated constraint. No message, log or plan ever holds a database's password.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.errors import AutotuneError, InvalidInput, NothingFits
from autotune.events import Notice, OnEvent
from autotune.plan import base
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.file import parse_plan
from autotune.plan.plan import TrainingPlan
from autotune.system.files import ESCAPE_CHARACTERS, cache_path, data_path, quote_error

if TYPE_CHECKING:  # storages are checked before torch is imported
    from autotune.search.next import ResidualSearch, SearchLimits
    from autotune.search.problem import PlanningProblem
    from autotune.search.trials import TrialFunction

POLL_SECONDS = 0.5  # between looks at what other workers do
HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 30  # a worker without a heartbeat for so long is dead
MAX_RETRIES = 1  # of a candidate that took its worker down; then it is a crash
CONNECT_SECONDS = 10  # by default TCP tries a server that is away for two minutes
MAX_ATTEMPTS = 5  # workers that create tables at the same moment get into each other's way

BEGAN, RESULT, STOPPED, PLAN = "began", "result", "stopped", "plan"
"""Trial attributes: the number of the trial that began (a retry has that of the one before); a
result; that a worker ended a trial, and was not taken down by it; a plan that a worker proposes."""
IDENTITY, ENDED = "identity", "ended"
"""Study attributes: what is searched for, and on what; that nothing ran, so there is no plan."""


@contextmanager
def open_study(
    problem: PlanningProblem, autotune_version: str, on_event: OnEvent
) -> Iterator[Study]:
    """Open the study of a problem: under the user's name, else in a file in the cache folder.
    Raises InvalidInput if the URL cannot be used or the study is another search's, AutotuneError if
    the storage failed."""
    request, device = problem.request, problem.hardware.device
    key: dict[str, object] = {
        **problem.identity,
        "autotune": autotune_version,  # what another version measured is measured again
        "model": str(problem.job.model_ref),  # random weights and real ones fail in other ways
        "libraries": problem.hardware.versions.model_dump(mode="json"),
        "budget": device.budget_bytes if device.budget_set_by_user else None,
    }
    url, path = request.storage, cache_path("searches", f"{base.digest_of(key)[-32:]}.db")
    if request.study is not None:
        path = data_path("studies.db")
    if url is None and (request.study is not None or request.interrupted != "ignored"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{path}"
        except OSError as error:
            text = f"trials are kept in memory only: {path.parent}: {error.strerror}"
            on_event(Notice(text=text))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None:
        yield optuna.create_study()
        return
    try:
        study = _load_study(url, problem)
    except Exception as error:
        if request.study is not None or "locked" in str(error):
            raise
        path.unlink(missing_ok=True)  # damaged, or of another Optuna: it is measured again
        study = _load_study(url, problem)
    number = 0 if request.study else len(take_snapshot(study).results)
    if number:
        known = "one trial" if number == 1 else f"{number} trials"
        text = f"an interrupted search continues: {known} known (--fresh forgets them)"
        on_event(Notice(text=text))
    with _translate_errors(url, "results of finished trials are kept; "):
        try:
            yield study
        except NothingFits:
            study.set_user_attr(ENDED, True)  # there may be more memory next time
            raise


def _load_study(url: str, problem: PlanningProblem) -> Study:
    name, identity = problem.request.study, problem.identity
    with _translate_errors(url, only_reads=True):
        storage = _connect(url)
        if name is None:
            number = max(1, len(optuna.get_all_study_names(storage)))
            name = f"search {number}"
            last = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            is_over = ENDED in last.user_attrs or published_plan(last) is not None
            if is_over or (problem.request.interrupted == "forgotten" and last.trials):
                name = f"search {number + 1}"
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        take_snapshot(study)  # raises if its results are damaged
        stored = study.user_attrs.get(IDENTITY) or identity
        pairs = ((key, stored.get(key), here) for key, here in identity.items())
        differing = [
            f"{key}: {there} there, {here} here" for key, there, here in pairs if there != here
        ]
        if differing:
            what = f"the search {name!r} is for another request or machine; {'; '.join(differing)}"
            hint = "workers of one search need equal machines and requests; name another --study"
            raise InvalidInput(what, hint=hint)
        study.set_user_attr(IDENTITY, dict(identity))
    return study


def check_storage(url: str) -> None:
    """Connect, so that a storage that cannot be used is told early. Raises as `open_study`."""
    with _translate_errors(url):
        _connect(url)


class _Storage(RDBStorage):
    def record_heartbeat(self, trial_id: int) -> None:
        """Record it; ignore a failure, since nothing in this thread could handle it."""
        with suppress(StorageInternalError):
            super().record_heartbeat(trial_id)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        # what has begun has a heartbeat: for Optuna, a trial without one never ends
        if key == BEGAN:
            super().record_heartbeat(trial_id)
        super().set_trial_user_attr(trial_id, key, value)


def _connect(url: str) -> RDBStorage:
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError  # .3 s, for storages alone

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
def _translate_errors(url: str, kept: str = "", *, only_reads: bool = False) -> Iterator[None]:
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        from sqlalchemy.exc import SQLAlchemyError

        failure: BaseException | None = error  # Optuna raises others if it cannot store an end
        while not isinstance(failure, SQLAlchemyError | StorageInternalError | None):
            failure = failure.__cause__ or failure.__context__
        if failure is None and only_reads:
            what = f"the study cannot be read: {type(error).__name__}: {quote_error(error, url)}"
            hint = "it is damaged, or another version's: name another --study"
            raise InvalidInput(what, hint=hint) from None
        if failure is None:
            raise
        while failure.__cause__ is not None:  # the outer errors say it in SQL
            failure = failure.__cause__
        raise AutotuneError(
            f"the storage of the search failed: {quote_error(failure, url)}",
            hint=f"{kept}run the same command again once the storage can be reached. "
            "If its file is damaged, name another --study",
        ) from None  # the chain would show what was left out


class StudySnapshot(NamedTuple):
    """State of a search."""

    results: tuple[TrialResult, ...]
    running: tuple[Candidate, ...]
    has_waiting: bool  # whether candidates of workers that died wait to be tried again


def take_snapshot(study: Study) -> StudySnapshot:
    """Return the state of all trials of a study."""
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
    left = tuple(one for one in running if one not in results)
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

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        snapshot = take_snapshot(study)
        if self.is_over(snapshot):
            return {}  # the trial then has nothing to do
        chosen = self.search.next_candidate(snapshot.results, snapshot.running)
        return {name: getattr(chosen, name) for name in search_space} if chosen else {}

    def sample_independent(self, *asked: object, **named: object) -> Any:
        raise RuntimeError("every knob is sampled relatively")


def run_search(
    search: ResidualSearch,
    run: TrialFunction,
    limits: SearchLimits,
    on_trial: Callable[[TrialResult], object],
    *,
    is_enough: Callable[[Sequence[TrialResult]], object] = lambda results: False,
    study: Study | None = None,
) -> tuple[TrialResult, ...]:
    """Try candidates until the search is over, or `is_enough`; return all results in the order in
    which `on_trial` is called with them, other workers' too, first with those that the study has.
    """
    if not search.remaining(()):
        return ()

    choices = search.space.tried_choices

    def is_over(snapshot: StudySnapshot) -> bool:
        return bool(is_enough(snapshot.results)) or search.is_over(limits, *snapshot)

    def objective(trial: Trial) -> float:
        if not trial.params and not trial.relative_params:
            raise optuna.TrialPruned("the search was over")
        trial.set_user_attr(BEGAN, trial.number)
        chosen = {name: trial.suggest_categorical(name, values) for name, values in choices.items()}
        for other in trial.study.get_trials(deepcopy=False):
            is_alive = _is_running(other) or other.state == TrialState.COMPLETE
            if other.number < trial.number and is_alive and other.params == trial.params:
                raise optuna.TrialPruned("another worker chose the same at the same moment")
        if (stored := trial.user_attrs.get(RESULT)) is not None:  # its worker died just afterwards
            result = TrialResult.model_validate_json(stored)
        else:
            try:
                result = run(Candidate.model_validate(chosen))
            except BaseException:  # interrupted: it says nothing about the candidate
                trial.set_user_attr(STOPPED, True)
                raise
            trial.set_user_attr(RESULT, result.model_dump_json())
        trial.set_constraint("failed (0 if it ran)", 0.0 if result.outcome == "ok" else 1.0)
        return result.median_step_seconds or float("inf")

    study = study or optuna.create_study()
    study.sampler = ResidualSampler(search, is_over)
    warnings.simplefilter("ignore", ExperimentalWarning)
    fail_stale_trials(study)
    told: dict[Candidate, TrialResult] = {}
    while True:
        snapshot = take_snapshot(study)
        for result in snapshot.results:
            if result.candidate not in told:
                told[result.candidate] = result
                on_trial(result)
        if not is_over(snapshot):
            # Taken for dead, a worker cannot end its trial, which another one has by now.
            with suppress(UpdateFinishedTrialError):
                study.optimize(objective, n_trials=1)
        elif snapshot.running:
            time.sleep(POLL_SECONDS)
            fail_stale_trials(study)  # if one of the others dies, this worker tries its candidate
        else:
            return tuple(told.values())


def memoize(
    study: Study, key: str, measure: Callable[[], TrialResult | None]
) -> TrialResult | None:
    """Read what an interrupted search stored under a key, or measure and store it."""
    if (stored := study.user_attrs.get(key)) is not None:
        return TrialResult.model_validate_json(stored)
    if (found := measure()) is not None:
        study.set_user_attr(key, found.model_dump_json())
    return found


def published_plan(study: Study) -> TrainingPlan | None:
    """Read the plan that this search ended in; None before."""
    proposals = (trial.user_attrs.get(PLAN) for trial in study.get_trials(deepcopy=False))
    first = next((text for text in proposals if text is not None), None)
    return parse_plan(first) if first is not None else None


def publish_plan(study: Study, plan: TrainingPlan) -> TrainingPlan:
    """Propose a plan; returns the first that any worker proposed: trials are numbered."""
    if published_plan(study) is None:
        attributes = {PLAN: plan.model_dump_json()}
        study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs=attributes))
    return published_plan(study) or plan
