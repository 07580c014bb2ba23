"""Where a search keeps its trials: at the place that the user names, else in a file of its own until it has its plan.

The file lies in the user's cache folder, under the digest of question and machine. Where an earlier search of the same
was interrupted it is still there, and that search goes on.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import platformdirs

from autotune.errors import NothingFits
from autotune.planning.case import Case
from autotune.schema import digest_of
from autotune.search.sampler import release_dead, standing_of
from autotune.search.storage import Place, opened_study, safe_words
from autotune.search.study import frozen_plan


@contextlib.contextmanager
def kept_study(case: Case, autotune_version: str, on_note: Callable[[str], None]) -> Iterator[optuna.Study]:
    """The study of this case: new, or as an interrupted search or other workers left it.

    Args:
        case: what is searched.
        autotune_version: part of the question: what another version measured is measured again.
        on_note: told where a search goes on, or cannot be kept.

    Raises:
        InvalidInput: the name or URL is none, or the study is about another question.
        AutotuneError: the storage failed.
    """
    question, path = case.question, _path(case, autotune_version)
    place = question.study
    if place is None and question.interrupted != "ignored":
        place = _file_of_its_own(path, case, on_note)
    with safe_words(place):
        try:
            yield opened_study(place, case.identity)
        except NothingFits:
            if question.study is None:
                path.unlink(missing_ok=True)  # it came to its end: there may be more memory next time
            raise


def _file_of_its_own(path: Path, case: Case, on_note: Callable[[str], None]) -> Place | None:
    place = Place("search", f"sqlite:///{path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if case.question.interrupted == "forgotten" or (path.exists() and not _goes_on(place, case, on_note)):
            path.unlink(missing_ok=True)
    except OSError as error:
        on_note(f"trials are kept in memory alone: {path.parent}: {error.strerror}")
        return None
    return place


def _goes_on(place: Place, case: Case, on_note: Callable[[str], None]) -> bool:
    """Whether a search was interrupted there, or is running: not where it has its plan, or nobody can read it."""
    try:
        study = opened_study(place, case.identity)
        release_dead(study)
        standing = standing_of(study)
        if frozen_plan(study) is not None:
            return False
    except Exception as error:  # damaged, or of another Optuna: what it held is measured again
        if "database is locked" in str(error):  # of a process that lives
            raise
        return False
    known = len(standing.results)
    trials = "one trial" if known == 1 else f"{known or 'no'} trials"
    if standing.taken or standing.undecided:  # of a process that lives
        on_note(f"another search of the same runs: this one joins it, {trials} known")
    elif known:
        on_note(f"an interrupted search of the same goes on: {trials} known (--fresh forgets them)")
    return True


def _path(case: Case, autotune_version: str) -> Path:
    device = case.hardware.device
    key: dict[str, object] = {
        **case.identity,
        "autotune": autotune_version,
        "model": case.question.model,  # random weights and real ones fail in other ways
        "libraries": case.hardware.versions.model_dump(mode="json"),
        "budget": device.budget_bytes if device.budget_set_by_user else None,
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return platformdirs.user_cache_path("autotune") / "searches" / f"{name}.db"
