"""The name of a search and where it is stored, judged before the libraries that store it are
imported.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.runtime import ESCAPE_CHARACTERS, is_clear_url

HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 30
"""A worker without a heartbeat for so long is dead."""
JOURNAL_SUFFIX = ".journal"
"""What the name of a file on a shared folder ends with."""


@dataclass(frozen=True)
class StudyLocation:
    """The name of a search and the storage that it is in."""

    name: str
    url: str | None = field(default=None, repr=False)
    """SQLAlchemy's, e.g. `postgresql+psycopg://user:password@host/database`, or a file on a
    shared folder whose name ends with `.journal`; None for a file of the user's own."""
    heartbeat_seconds: int = HEARTBEAT_SECONDS
    grace_seconds: int = GRACE_SECONDS

    def __post_init__(self) -> None:
        """Raise InvalidInput if the name cannot be one, or nobody can tell where the URL's
        password ends.
        """
        if not re.fullmatch(r"[\w.-]{1,80}", self.name):
            raise InvalidInput(
                f"{self.name!r} cannot name a study",
                hint="use up to 80 letters, digits, dots and dashes",
            )
        if self.server_url and not is_clear_url(self.server_url):
            raise InvalidInput(
                "it is unclear which part of the URL of the shared search is the password",
                hint=(
                    "write it like postgresql+psycopg://user:password@host/database; "
                    f"{ESCAPE_CHARACTERS}"
                ),
            )

    @property
    def server_url(self) -> str | None:
        """The URL, unless it is a file's, which holds no password."""
        return (
            None if self.url is None or self.url.startswith("sqlite:") or self.journal else self.url
        )

    @property
    def journal(self) -> Path | None:
        """The file on a shared folder, if it is one."""
        return (
            Path(self.url)
            if self.url and self.url.endswith(JOURNAL_SUFFIX) and "://" not in self.url
            else None
        )
