"""Numbers in short form with units, and lines that fit a terminal."""

import math
import textwrap
from collections.abc import Sequence

WIDTH = 80
BEYOND_MEASURE = 1e15  # no run takes so many seconds or bytes: a damaged file does


def memory_text(num_bytes: float | None) -> str:
    """Write `1.50 GiB`, `320 MiB`, `12 KiB`, `512 B`, or `-` when unknown."""
    if num_bytes is None:
        return "-"
    if num_bytes >= BEYOND_MEASURE:
        return f"{num_bytes / 2**30:.1e} GiB"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes >= 2**10 else f"{num_bytes:.0f} B"


def count_text(number: int) -> str:
    """Write `3.7M` or `20.4B`."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def seconds_text(seconds: float | None) -> str:
    """Write `45 us`, `0.123 s`, `45 s`, `3 min 05 s`, `2 h 10 min`, or `-` when unknown."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 60:
        return f"{seconds:.{3 if seconds < 10 else 0}f} s"
    if seconds >= BEYOND_MEASURE:
        return f"{seconds / 3600:.1e} h"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_left_text(seconds: float | None) -> str:
    """Write `3 s left`, or nothing when that is unknown or over."""
    if not seconds:
        return ""
    return (f"{math.ceil(seconds)} s" if seconds < 60 else seconds_text(seconds)) + " left"


def loss_text(loss: float) -> str:
    """Write `0.1234`, or `1.2e+30` of a run that left all bounds."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.1e}"


def change_text(share: float, digits: int = 0) -> str:
    """Write `+12%`, or `+1.2e+30%` of numbers that nothing measures."""
    return f"{share:+.{digits}%}" if abs(share) < 1e4 else f"{100 * share:+.1e}%"


def plus_minus(share: float | None) -> str:
    """Write ` ±25%`, to follow a predicted quantity; nothing if it was measured."""
    return "" if share is None else f" ±{share:.0%}"


def wrapped(text: str, hanging: int = 2) -> list[str]:
    """Break text into lines, later ones indented by `hanging` more; a long path stays whole."""
    plain = printable(text)
    indent = " " * (len(plain) - len(plain.lstrip()) + hanging)
    return textwrap.wrap(
        plain, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def with_command(words: str, command: str) -> list[str]:
    """Write words and a command to copy in one line or, if that is too long, in two."""
    line = printable(f"{words} {command}")
    return [line] if len(line) <= WIDTH else [*wrapped(words), f"    {printable(command)}"]


def titled_command(title: str, words: Sequence[str]) -> list[str]:
    """Write a command, whose words are quoted, in lines that a shell takes as they are."""
    start = f"{title:<15}{words[0]}"
    if len(whole := " ".join([start, *words[1:]])) <= WIDTH:
        return [whole]
    lines = [start]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len("  \\") <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{'':<17}{word}")
    return lines


def capped(lines: Sequence[str], limit: int, rest: str) -> list[str]:
    """Keep the first `limit` lines; `rest` tells where to find more."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more{rest}"] if more > 0 else list(lines)


def cut(text: str) -> str:
    """Keep as much of `text` as fits one line."""
    plain = printable(text)
    return plain if len(plain) <= WIDTH else plain[: WIDTH - 3] + "..."


def printable(text: str) -> str:
    """Replace control characters, because names come from untrusted files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def printable_lines(text: str) -> str:
    """Make each line `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))
