"""What messages may say about a URL, which may hold passwords and tokens.

Nothing is masked inside a library's words: what stays would still tell how long a secret is, and
where a short one was.
"""

import re
from urllib.parse import unquote

URL = re.compile(
    r"(?P<origin>[A-Za-z][\w+.-]*://)(?:(?P<login>[^@/?#;\\]*)@)?(?P<place>[^@?#;\\]*)(?P<rest>[?#;][^@]*)?"
)
"""A URL in which each character can have one meaning only."""
SCHEME = re.compile(r"[A-Za-z][\w+.-]+:[/\\]")
"""Beginning of a URL, or of what was meant to be one."""
ESCAPE_CHARACTERS = (
    "inside a name or a password write @ as %40, / as %2F, ? as %3F, # as %23 and ; as %3B"
)


def is_clear_url(url: str) -> bool:
    """Whether it is certain which part of the URL is a password."""
    return URL.fullmatch(url) is not None


def describe_url(url: str) -> str:
    """The URL with `***` for its login and for all that follows `?`, `#` or `;`; its scheme
    alone if it is unclear."""
    parts = URL.fullmatch(url)
    if parts is None:
        origin = URL.match(url)
        return f"{origin['origin'] if origin else ''}***"
    login = "" if parts["login"] is None else "***@"
    return f"{parts['origin']}{login}{parts['place']}{'***' if parts['rest'] else ''}"


def quote_error(error: BaseException, url: str | None = None) -> str:
    """What a library says, in one printable line; not what repeats a secret of `url`, or if that
    is unclear."""
    text = " ".join(
        "".join(letter if letter.isprintable() else " " for letter in str(error)).split()
    )
    secrets = _secrets_in(url) if url else set()
    if secrets is None or any(
        re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text) for secret in secrets
    ):
        return "what it says is not shown because it may repeat a password"
    return text[:300]


def _secrets_in(url: str) -> set[str] | None:
    """What nobody else may read; None if that is unclear."""
    parts = URL.fullmatch(url)
    if parts is None:
        return None
    login, rest = parts["login"] or "", parts["rest"] or ""
    secrets = {
        login.partition(":")[2] or login,
        *(pair.rpartition("=")[2] for pair in re.split("[?#;&]", rest)),
    }
    secrets |= {unquote(secret) for secret in secrets}
    return (secrets | {word for secret in secrets for word in re.findall(r"\w{4,}", secret)}) - {""}
