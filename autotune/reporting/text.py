"""Numbers in short form with units, and lines that fit a terminal."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80


def memory_text(num_bytes: float | None) -> str:
    """`1.50 GiB`, `320 MiB`, `12 KiB`, `512 B`, or `-` when unknown."""
    if num_bytes is None:
        return "-"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes >= 2**10 else f"{num_bytes:.0f} B"


def count_text(number: int) -> str:
    """`3.7M` or `20.4B`."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def seconds_text(seconds: float | None) -> str:
    """`45 us`, `0.123 s`, `45 s`, `3 min 05 s`, `2 h 10 min`, or `-` when unknown."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


SMOOTHING = 0.05
"""Share of each new value in a smoothed series, once there are enough of them."""


def smoothed(values: Iterable[float]) -> list[float]:
    """An exponential moving average; the first values are means of what there is, so that none starts from zero."""
    series: list[float] = []
    for number, value in enumerate(values, 1):
        series.append(smooth(series[-1] if series else 0.0, value, number))
    return series


def smooth(before: float, value: float, number: int) -> float:
    """The moving average after the `number`-th value, counted from 1."""
    share = max(SMOOTHING, 1 / number)
    return (1 - share) * before + share * value


def uncertainty_text(share: float | None) -> str:
    """` ±25%`, to follow a predicted quantity; nothing if it was measured."""
    return "" if share is None else f" ±{share:.0%}"


def wrapped(text: str, hanging: int = 2) -> list[str]:
    """`text` in lines of `WIDTH`, later ones indented by `hanging` more; one empty line if it is empty."""
    plain = printable(text)
    indent = " " * (len(plain) - len(plain.lstrip()) + hanging)
    return textwrap.wrap(plain, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def capped(lines: Sequence[str], limit: int, rest: str) -> list[str]:
    """The first `limit` lines; of more, how many there are, and in the words of `rest` where to find them."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more{rest}"] if more > 0 else list(lines)


def cut(text: str) -> str:
    """As much of `text` as fits one line, with dots if there is more."""
    plain = printable(text)
    return plain if len(plain) <= WIDTH else plain[: WIDTH - 3] + "..."


def printable(text: str) -> str:
    """`text` without control characters, because names come from untrusted files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def printable_lines(text: str) -> str:
    """`text` of several lines, each `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))
