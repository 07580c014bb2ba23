"""No message tells a password, whatever was typed in place of a URL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.system.files import describe_url, is_clear_url, quote_error

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://team/profiles", "s3://team/profiles"),
        ("postgresql+psycopg://me:hunter2@host:5432/db", "postgresql+psycopg://***@host:5432/db"),
        ("https://hunter2@host/x", "https://***@host/x"),
        ("https://me:[hunter2@host/x", "https://***@host/x"),
        ("https://host/x?token=hunter2", "https://host/x***"),
        ("https://host/x#hunter2", "https://host/x***"),
        ("https://host/x;token=hunter2?a", "https://host/x***"),
        ("https://me:p@hunter2@host/x", "https://***"),
        ("https://me:p/hunter2@host/x", "https://***"),
        ("https://me:p#hunter2@host/x", "https://***"),
        ("https:/me:hunter2@host/x", "***"),
        ("me:hunter2@host/x", "***"),
        ("hunter2", "***"),
    ],
)
def test_of_a_url_only_what_cannot_be_a_secret_is_shown(url: str, shown: str) -> None:
    assert describe_url(url) == shown
    assert is_clear_url(url) == (shown not in ("https://***", "***"))


@pytest.mark.parametrize(
    ("url", "said", "is_shown"),
    [
        ("https://me:hunter2@host/x", "no route to host", True),
        ("https://me:hunter2@host/x", "cannot resolve me:hunter2@host", False),
        ("https://hunter2@host/x", "who is hunter2?", False),
        ("https://me:hunt%65r2@host/x", "who is hunter2?", False),
        ("https://host/x?token=hunter2&a=b", "403 for hunter2", False),
        ("https://host/x;hunter2", "no hunter2 here", False),
        ("https://me:p@hunter2@host/x", "cannot resolve hunter", False),
        ("https://me:a@host/x", "a host is away", False),
        ("https://me:a@host/x", "what is away", True),
        ("https://me:@host/x?", "no route", True),
        (None, "no\x1b[2J  route\n", True),
    ],
)
def test_a_library_is_quoted_whole_or_not_at_all(
    url: str | None, said: str, is_shown: bool
) -> None:
    """A mask in place of each `a` would tell a password of one letter, and leave the rest of
    another."""
    quoted = quote_error(OSError(said), url)
    assert "***" not in quoted
    assert (quoted == " ".join(said.replace("\x1b", " ").split())) is is_shown
    assert ("is not shown" in quoted) is not is_shown
    assert len(quote_error(OSError("x" * 10_000), url)) <= 300


MARKS = st.text(alphabet="@:/?#;=&%[] ", max_size=4)


@given(
    st.lists(MARKS, min_size=5, max_size=5),
    st.sampled_from(["https://", "https:/", "s3://", "", "postgresql://"]),
)
def test_no_password_is_shown_wherever_marks_stand_in_it(marks: list[str], scheme: str) -> None:
    first, second, third, fourth, fifth = marks
    url = f"{scheme}{first}me{second}:{third}{SECRET}{fourth}@{fifth}host/db"
    assert SECRET not in describe_url(url)
    assert SECRET not in quote_error(OSError(f"cannot reach {SECRET}"), url)
