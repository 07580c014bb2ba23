"""Where a search keeps its trials: at the place that the user names, else in a file of its own
until it has its plan.

The file lies in the user's cache folder, under the digest of request and machine. If an earlier
search of the same was interrupted it is still there, and that search goes on.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
from filelock import ReadWriteLock, Timeout

from autotune.errors import NothingFits
from autotune.planning.problem import PlanningProblem
from autotune.runtime import cache_path
from autotune.schema import digest_of
from autotune.search import (
    StudyLocation,
    fail_dead_trials,
    open_study,
    published_plan,
    take_snapshot,
    translate_storage_errors,
)


@contextlib.contextmanager
def kept_study(
    problem: PlanningProblem, autotune_version: str, on_note: Callable[[str], None]
) -> Iterator[optuna.Study]:
    """The study of this problem: new, or as an interrupted search or other workers left it.

    Args:
        problem: what is searched.
        autotune_version: part of its identity: what another version measured is measured again.
        on_note: told if a search goes on, or cannot be kept.

    Raises:
        InvalidInput: the name or URL is none, or the study is about another problem.
        AutotuneError: the storage failed.
    """
    request, path = problem.request, _path(problem, autotune_version)
    with contextlib.ExitStack() as held:
        users = None
        if request.study is None and request.interrupted != "ignored":
            users = _users(path, held, on_note)
        place = request.study if users is None else _file_of_its_own(path, users, problem, on_note)
        study = open_study(place, problem.identity)
        with translate_storage_errors(place, is_searching=True):
            try:
                yield study
            except NothingFits:
                if users is not None and _is_only_user(users):
                    path.unlink(
                        missing_ok=True
                    )  # it came to its end: there may be more memory next time
                raise


def _users(
    path: Path, held: contextlib.ExitStack, on_note: Callable[[str], None]
) -> ReadWriteLock | None:
    """The lock that all processes share that use the search's file; None if nothing can be
    written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        users = ReadWriteLock(path.with_suffix(".users"), is_singleton=False)
    except OSError as error:
        on_note(f"trials are kept in memory only: {path.parent}: {error.strerror}")
        return None
    held.callback(users.close)
    return users


def _is_only_user(users: ReadWriteLock) -> bool:
    """Whether no other process uses the file; if so the lock is now held exclusively, else not
    at all.
    """
    users.release(force=True)  # a shared lock cannot be upgraded
    try:
        users.acquire_write(timeout=0.1)  # of two that try at once, one gets it
    except Timeout:
        return False
    return True


def _file_of_its_own(
    path: Path, users: ReadWriteLock, problem: PlanningProblem, on_note: Callable[[str], None]
) -> StudyLocation | None:
    """Where the search is kept while the lock on `users` is held; None beside one that is not to
    be joined.
    """
    place, fresh = (
        StudyLocation("search", f"sqlite:///{path}"),
        problem.request.interrupted == "forgotten",
    )
    alone = _is_only_user(users)
    if fresh and not alone:
        on_note("the same search is already running: this one keeps its trials in memory only")
        return None
    if fresh or (path.exists() and not _goes_on(place, problem, on_note, alone) and alone):
        path.unlink(missing_ok=True)
    users.release(force=True)  # an exclusive lock cannot be downgraded
    users.acquire_read()
    return place


def _goes_on(
    place: StudyLocation, problem: PlanningProblem, on_note: Callable[[str], None], is_alone: bool
) -> bool:
    """Whether a search was interrupted there, or is running: not if it has its plan, or nobody
    can read it.
    """
    try:
        study = open_study(place, problem.identity)
        fail_dead_trials(study, is_alone=is_alone)
        snapshot = take_snapshot(study)
        if published_plan(study) is not None:
            return False
    except Exception as error:  # damaged, or of another Optuna: what it held is measured again
        if "database is locked" in str(error):  # of a process that lives
            raise
        return False
    known = len(snapshot.results)
    trials = "one trial" if known == 1 else f"{known or 'no'} trials"
    if snapshot.running or snapshot.undecided:  # of a process that lives
        on_note(f"the same search is already running: this one joins it, {trials} known")
    elif known:
        on_note(f"an interrupted search continues: {trials} known (--fresh forgets them)")
    return True


def _path(problem: PlanningProblem, autotune_version: str) -> Path:
    budget = problem.memory_budget
    key: dict[str, object] = {
        **problem.identity,
        "autotune": autotune_version,
        "model": problem.request.model,  # random weights and real ones fail in other ways
        "libraries": problem.hardware.versions.model_dump(mode="json"),
        "budget": budget.num_bytes if budget.is_set_by_user else None,
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return cache_path("searches", f"{name}.db")
