"""Where a search is stored, so that it survives its process and can be shared: a SQLite file, a
database by its URL, or a journal on a shared folder.

A database's password stays in the URL: no message, log or plan ever holds it.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from autotune.errors import AutotuneError, InvalidInput
from autotune.runtime import data_path, quote_error
from autotune.search.journal import SharedJournal
from autotune.search.location import StudyLocation
from autotune.search.study import OBJECTIVE, take_snapshot

IDENTITY = "question"
"""Study attribute: what is searched for, and on what. Its name is that of studies which exist."""
CREATION_SECONDS = 3.0
"""Time that a study's creator has to store its identity."""
CONNECT_SECONDS = 10
"""A server that does not answer within so long is told to be away; by default TCP tries for two
minutes.
"""
MAX_ATTEMPTS = 5
"""Workers that create a database's tables at the same moment get into each other's way."""


def open_study(location: StudyLocation | None, identity: Mapping[str, str | None]) -> optuna.Study:
    """The study at `location`, new or as other workers left it; in memory without a location.

    Args:
        location: name and storage.
        identity: by name, all that must be equal for results to count; shown if it is not.

    Raises:
        InvalidInput: the name or URL cannot be used, or the study has another identity.
        AutotuneError: the storage cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if location is None:
        return optuna.create_study()
    name = location.name
    with translate_storage_errors(location):
        try:
            storage = _connect(location)
            try:
                study = optuna.create_study(storage=storage, study_name=name)
                study.set_user_attr(IDENTITY, dict(identity))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ExperimentalWarning)
                    study.set_metric_names([OBJECTIVE])
            except DuplicatedStudyError:
                study = optuna.load_study(storage=storage, study_name=name)
                _require_identity(study, location, identity)
                take_snapshot(study)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # damage in what is text to the database
            reason = quote_error(error, location.server_url)
            raise AutotuneError(
                f"the study {name!r} is damaged: {reason}", hint="name another --study"
            ) from None
    return study


def check_storage(location: StudyLocation) -> None:
    """Connect to the storage and leave it as it is, so that one that cannot be used is told before
    long work.

    Raises:
        InvalidInput, AutotuneError: as `open_study`.
    """
    with translate_storage_errors(location):
        _connect(location)


@contextmanager
def translate_storage_errors(
    location: StudyLocation | None, *, is_searching: bool = False
) -> Iterator[None]:
    """Turn a storage's errors into ours, without the password; their hint tells what becomes of
    trials if any may have run by now, as when the search `is_searching`.

    Raises:
        AutotuneError: the storage failed.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        failure = _find_storage_error(error, location)
        if location is None or failure is None:
            raise
        while failure.__cause__ is not None:  # the outer errors say it in SQL
            failure = failure.__cause__
        kept = "results of finished trials are kept; " if is_searching else ""
        raise AutotuneError(
            f"the storage of the search failed: {quote_error(failure, location.server_url)}",
            hint=f"{kept}run the same command again once the storage can be reached. "
            "If its file is damaged, name another --study",
        ) from None  # the chain would show what was left out


def _find_storage_error(
    error: BaseException | None, location: StudyLocation | None
) -> BaseException | None:
    """The storage's error behind `error`: Optuna raises others when it cannot store the end of a
    trial.
    """
    journal = location.journal if location else None
    while error is not None and not isinstance(error, SQLAlchemyError | StorageInternalError):
        if (
            journal
            and isinstance(error, OSError)
            and str(error.filename).startswith(str(journal.with_suffix("")))
        ):
            break
        error = error.__cause__ or error.__context__
    return error


def _connect(location: StudyLocation) -> optuna.storages.BaseStorage:
    if location.journal:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return SharedJournal(
                location.journal, location.heartbeat_seconds, location.grace_seconds
            )
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return _create_storage(location)
        except ImportError as error:
            raise AutotuneError(
                f"there is no driver for this storage: {error.__cause__ or error}",
                hint=(
                    "for PostgreSQL: pip install 'lora-autotune[postgres]', and a URL that "
                    "begins "
                    "postgresql+psycopg://"
                ),
            ) from None
        except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
            if isinstance(error, ValueError) and location.server_url is None:
                raise
            raise InvalidInput(
                "SQLAlchemy cannot read the URL of the shared search",
                hint="write it like postgresql+psycopg://user:password@host/database",
            ) from None
        except (
            RuntimeError
        ) as error:  # Optuna has no class of its own for a database of another version
            if "table schema" not in str(error):
                raise
            raise AutotuneError(
                f"the search {location.name!r} was started with another version of Optuna",
                hint="update it: pip install --upgrade optuna; or name another --study",
            ) from None
        except SQLAlchemyError as error:
            if attempt == MAX_ATTEMPTS or "exist" not in str(error).lower():
                raise
            time.sleep(0.3 * attempt)
    raise AssertionError("the last attempt returns or raises")


class _StudyStorage(optuna.storages.RDBStorage):
    def record_heartbeat(self, trial_id: int) -> None:
        """In a thread of its own, where nobody could handle a failure: the next heartbeat may
        come through.
        """
        with suppress(StorageInternalError):
            super().record_heartbeat(trial_id)


def _create_storage(location: StudyLocation) -> optuna.storages.RDBStorage:
    url = location.url
    if url is None:
        folder = data_path("studies")
        folder.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{folder / (location.name + '.db')}"
    connect = {"timeout": 60} if url.startswith("sqlite:") else {}
    connect |= {"connect_timeout": CONNECT_SECONDS} if url.startswith("postgresql") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _StudyStorage(
            url,
            engine_kwargs={"connect_args": connect, "pool_pre_ping": True, "hide_parameters": True},
            heartbeat_interval=location.heartbeat_seconds,
            grace_period=location.grace_seconds,
        )


def _require_identity(
    study: optuna.Study, location: StudyLocation, identity: Mapping[str, str | None]
) -> None:
    deadline = time.monotonic() + CREATION_SECONDS
    while (stored := study.user_attrs.get(IDENTITY)) is None:
        if time.monotonic() > deadline:  # its creator died in between
            study.set_user_attr(IDENTITY, dict(identity))
        time.sleep(0.1)
    pairs = ((name, stored.get(name), value) for name, value in identity.items())
    differing = [
        f"{name}: {there} there, {here} here" for name, there, here in pairs if there != here
    ]
    if differing:
        raise InvalidInput(
            f"the search {location.name!r} is for another request or machine; "
            f"{'; '.join(differing)}",
            hint=(
                "workers of one search need equal machines and equal requests; name another "
                "search "
                "with --study"
            ),
        )
