"""Numbers in short form with units, and lines that fit a terminal."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

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


def range_text(
    value: float,
    uncertainty: float | None,
    form: Callable[[float], str],
    sigmas: tuple[float, float] | None = None,
) -> str:
    """Write `7 to 12 s`: the range of a prediction, in standard errors of its logarithm, by default
    the errors of times."""
    if uncertainty is None:
        return form(value)
    from autotune.plan.prediction import TIME_SIGMAS  # `--help` waits for no pydantic

    low, high = (form(value * math.exp(each * uncertainty)) for each in sigmas or TIME_SIGMAS)
    if low == high:
        return low
    (first, _, unit), (_, _, same) = low.partition(" "), high.partition(" ")
    return f"{first if unit == same else low} to {high}"


def rough_seconds(seconds: float) -> str:
    """Write seconds to two digits in the unit that suits them: `0.12 s`, `35 min`, `4.2 h`."""
    units = (3600, "h"), (60, "min"), (1, "s")
    size, unit = next((each for each in units if seconds >= 1.5 * each[0]), units[-1])
    number = seconds / size
    digits = ".1e" if number >= 1e6 else ".0f" if number >= 9.95 else ".2g"
    return f"{number:{digits}} {unit}"


def wrapped(text: str, hanging: int = 2) -> list[str]:
    """Break text into lines, later ones indented by `hanging` more; a long path stays whole."""
    plain = printable(text)
    indent = " " * (len(plain) - len(plain.lstrip()) + hanging)
    return textwrap.wrap(
        plain, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def folded(text: str) -> str:
    """Break lines that are too wide between words; commands have been (`with_command`)."""
    return "\n".join(part for line in text.split("\n") for part in wrapped(line, 4))


def titled_lines(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Write titles in a column and their texts next to them."""
    return [
        part for title, text in facts for part in wrapped(f"{title:<14} {text}", 15 * bool(title))
    ]


def with_command(words: str, command: str) -> list[str]:
    """Write words and a command to copy in one line or, if that is too long, on lines of its own
    that a shell takes as they are."""
    line = printable(f"{words} {command}")
    quoted = re.findall(r"(?:'[^']*'|\S)+", printable(command))
    return [line] if len(line) <= WIDTH else [*wrapped(words), *titled_command("    ", quoted)]


def titled_command(title: str, words: Sequence[str]) -> list[str]:
    """Write a command, whose words are quoted, in lines that a shell takes as they are."""
    start = f"{title}{words[0]}"
    if len(whole := " ".join([start, *words[1:]])) <= WIDTH:
        return [whole]
    lines = [start]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len("  \\") <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{'':<{len(title) + 2}}{word}")
    return lines


def capped(lines: Sequence[str], limit: int, rest: str) -> list[str]:
    """Keep the first `limit` lines; `rest` tells where to find more."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more{rest}"] if more > 0 else list(lines)


def printable(text: str) -> str:
    """Replace control characters, because names come from untrusted files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def printable_lines(text: str) -> str:
    """Make each line `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))


def without_logins(text: str) -> str:
    """Return the text with `***` for what may be a password or a token in something like a URL.
    Takes time in proportion to the text, whatever it is."""
    return re.sub(r"\S+", lambda word: _hide_login(word[0]), text)


def _hide_login(word: str) -> str:
    if begin := re.search(r"\w:[/\\]+", word):
        origin, place = word[: begin.end()], word[begin.end() :]
        if "@" in place:
            place = f"***@{place.rpartition('@')[2]}"
        if end := re.search("[?#;]", place):
            secret = place[end.end() :]
            after = secret[len(secret.rstrip("\"'),.:")) :]
            place = place if after == secret else f"{place[: end.start()]}***{after}"
        word = origin + place
    return "/".join(map(_hide_short_login, word.split("/"))) if "@" in word else word


def _hide_short_login(part: str) -> str:
    # `***@HOST` for `NAME:PASSWORD@HOST`
    end = max((found.start() for found in re.finditer(r"@(?=\w)", part)), default=0)
    colon = re.search("[^'\"=]:", part[:end])
    if colon is None:
        return part
    start = max(part.rfind(quote, 0, colon.end()) for quote in "'\"=") + 1
    return f"{part[:start]}***{part[end:]}"
