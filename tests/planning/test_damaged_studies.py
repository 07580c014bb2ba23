"""A search's own file that is damaged, or of another Optuna, is begun anew; one that is in use
is left alone.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import ReadWriteLock
from sqlalchemy import Engine, event

from autotune.planning.resuming import _file_of_its_own
from autotune.search.location import StudyLocation
from autotune.search.storage import open_study

QUESTION: dict[str, str | None] = {"model": "m"}
CASE: Any = SimpleNamespace(identity=QUESTION, request=SimpleNamespace(interrupted="continued"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.db"
    open_study(StudyLocation("search", f"sqlite:///{path}"), QUESTION)
    return path


def goes_on(path: Path) -> bool:
    """Whether the file is kept."""
    users = ReadWriteLock(path.with_suffix(".users"), is_singleton=False)
    try:
        place = _file_of_its_own(path, users, CASE, lambda note: None)
    finally:
        users.close()
    assert place is not None
    return path.exists()


def test_a_sound_file_goes_on(file: Path) -> None:
    assert goes_on(file)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE alembic_version SET version_num = 'v99.0.0.a'",
        "UPDATE study_user_attributes SET value_json = '{'",
        "UPDATE study_user_attributes SET value_json = '5'",
        """UPDATE study_user_attributes SET value_json = '{"model": "other"}'""",
    ],
)
def test_what_cannot_be_read_is_begun_anew(file: Path, damage: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(damage)
    assert not goes_on(file)


@pytest.mark.parametrize("content", [b"junk" * 1000, bytes(9000)])
def test_what_is_no_database_is_begun_anew(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert not goes_on(file)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Connections that wait a moment, not a minute, for a lock."""

    def shorten(connection: Any, record: object) -> None:
        connection.execute("PRAGMA busy_timeout = 50")

    event.listen(Engine, "connect", shorten)
    yield
    event.remove(Engine, "connect", shorten)


@pytest.mark.usefixtures("impatient")
def test_a_file_that_another_process_holds_is_not_thrown_away(file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Exception, match="database is locked"):
            goes_on(file)
    assert goes_on(file)
