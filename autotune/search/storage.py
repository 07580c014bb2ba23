"""Where a search is kept, so that it survives its process and can be shared: a SQLite file, or a database by its URL.

A database's password stays in the URL: no message, log or plan ever holds it.
"""

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError

from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.runtime import data_path
from autotune.search.sampler import take_snapshot

QUESTION = "question"
"""Study attribute: what is searched for, and on what."""
HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 30
"""A worker that has not been heard of for so long is dead."""
CREATION_SECONDS = 3.0
"""From a study's creation to its question."""
ATTEMPTS = 5
"""Workers that create a database's tables at the same moment get into each other's way."""


@dataclass(frozen=True)
class StudyPlace:
    """The name of a search and the storage that it is in."""

    name: str
    url: str | None = None
    """SQLAlchemy's, e.g. `postgresql+psycopg://user:password@host/database`; None for a file of the user's own."""
    heartbeat_seconds: int = HEARTBEAT_SECONDS
    grace_seconds: int = GRACE_SECONDS


def opened_study(place: StudyPlace | None, question: Mapping[str, str | None]) -> optuna.Study:
    """The study at `place`, new or as others left it; in memory where there is no place.

    Args:
        place: name and storage.
        question: by name, all that must be equal for results to count; shown where it is not.

    Raises:
        InvalidInput: the name or URL is none, or the study is about another question.
        AutotuneError: the storage cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if place is None:
        return optuna.create_study()
    if not re.fullmatch(r"[\w.-]{1,80}", place.name):
        raise InvalidInput(f"{place.name!r} cannot name a study", hint="use up to 80 letters, digits, dots and dashes")
    with translate_storage_errors(place):
        try:
            return _opened(place, question)
        except (ValueError, LookupError) as error:  # damage in what is text to the database
            reason = _without_password(first_line(error), place)
            raise AutotuneError(f"the study {place.name!r} is damaged: {reason}", hint="name another --study") from None


def _opened(place: StudyPlace, question: Mapping[str, str | None]) -> optuna.Study:
    storage = _storage(place)
    try:
        study = optuna.create_study(storage=storage, study_name=place.name)
        study.set_user_attr(QUESTION, dict(question))
    except DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=place.name)
        _require_same(study, place, question)
        take_snapshot(study)
    return study


@contextmanager
def translate_storage_errors(place: StudyPlace | None) -> Iterator[None]:
    """Turn a storage's errors into ours, without the password.

    Raises:
        AutotuneError: the storage failed.
    """
    if place is None:
        yield
        return
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        failure = _storage_failure(error)
        if failure is None:
            raise
        while failure.__cause__ is not None:  # what the others say of it is SQL
            failure = failure.__cause__
        reason = " ".join(str(failure).split())[:300]
        raise AutotuneError(
            f"the storage of the search failed: {_without_password(reason, place)}",
            hint="results of finished trials are kept; run the same command again once the storage can be reached. "
            "Where its file is damaged, name another --study",
        ) from None  # the chain would show what was left out


def _storage_failure(error: BaseException | None) -> BaseException | None:
    """The storage's error behind `error`: Optuna stumbles over its own feet where a trial cannot be told its end."""
    from sqlalchemy.exc import SQLAlchemyError

    while error is not None and not isinstance(error, SQLAlchemyError | StorageInternalError):
        error = error.__cause__ or error.__context__
    return error


def _storage(place: StudyPlace) -> optuna.storages.RDBStorage:
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _open(place)
        except ImportError as error:
            raise AutotuneError(
                f"there is no driver for this storage: {error.__cause__ or error}",
                hint="for PostgreSQL: pip install 'lora-autotune[postgres]', and a URL that begins postgresql+psycopg://",
            ) from None
        except ArgumentError:
            raise InvalidInput(
                "the URL of the shared search is none that SQLAlchemy knows",
                hint="write it like postgresql+psycopg://user:password@host/database",
            ) from None
        except SQLAlchemyError as error:
            if attempt == ATTEMPTS or "exist" not in str(error).lower():
                raise
            time.sleep(0.3 * attempt)
    raise AssertionError("the last attempt returns or raises")


class _StudyStorage(optuna.storages.RDBStorage):
    def record_heartbeat(self, trial_id: int) -> None:
        """In a thread of its own, which has nobody to tell of a failure: the next beat may come through."""
        with suppress(StorageInternalError):
            super().record_heartbeat(trial_id)


def _open(place: StudyPlace) -> optuna.storages.RDBStorage:
    url = place.url
    if url is None:
        folder = data_path("studies")
        folder.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{folder / (place.name + '.db')}"
    connect = {"timeout": 60} if url.startswith("sqlite:") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _StudyStorage(
            url,
            engine_kwargs={"connect_args": connect, "pool_pre_ping": True, "hide_parameters": True},
            heartbeat_interval=place.heartbeat_seconds,
            grace_period=place.grace_seconds,
        )


def _require_same(study: optuna.Study, place: StudyPlace, question: Mapping[str, str | None]) -> None:
    deadline = time.monotonic() + CREATION_SECONDS
    while (asked := study.user_attrs.get(QUESTION)) is None:
        if time.monotonic() > deadline:  # its creator died in between
            study.set_user_attr(QUESTION, dict(question))
        time.sleep(0.1)
    differing = [f"{name}: {asked.get(name)} there, {value} here" for name, value in question.items()
                 if asked.get(name) != value]  # fmt: skip
    if differing:
        raise InvalidInput(
            f"the search {place.name!r} is another one; {'; '.join(differing)}",
            hint="workers of one search have equal machines and ask the same; name a search of its own with --study",
        )


def _without_password(text: str, place: StudyPlace | None) -> str:
    netloc = urlsplit(place.url).netloc if place and place.url else ""
    password = netloc.rpartition("@")[0].partition(":")[2]
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, "***")
    return text
