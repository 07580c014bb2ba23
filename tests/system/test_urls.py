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
