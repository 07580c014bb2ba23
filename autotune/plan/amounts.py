"""Amounts as people write them: memory such as `20GiB`, sizes such as `1024x768`."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_bytes(amount: int | str) -> int:
    """Return an amount such as `20GiB` in bytes. Raises ValueError if it is none."""
    if isinstance(amount, int):
        return amount
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", amount)
    unit = UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{amount!r} is not an amount of memory, such as 20GiB or 900MiB")
    return int(float(match.group(1)) * unit)


def image_size(size: int | str | tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) in pixels of `1024` or `512x768`. Raises ValueError if it is
    neither."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, tuple):
        return size
    sides = size.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() for side in sides):
        raise ValueError(f"{size!r} is no resolution, such as 1024 (a square) or 512x768")
    return int(sides[0]), int(sides[-1])


def _hours(time: Any) -> Any:
    """The hours of text such as `2h` or `90 min`; another value as it is."""
    if not isinstance(time, str):
        return time
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d+)?)\s*(h|hours?|m|min|minutes?)\s*", time)
    if match is None:
        raise ValueError(f"{time!r} is not a time, such as 2h or 90min")
    return float(match.group(1)) / (1 if match.group(2).startswith("h") else 60)


MemoryAmount = Annotated[int | str, AfterValidator(memory_bytes)]
"""Bytes, or text such as `20GiB`, `900 MiB` or `20GB`; kept as bytes."""
Hours = Annotated[float, BeforeValidator(_hours), Field(ge=0)]
"""Hours, or text such as `2h` or `90min`; kept as hours."""
ImageSize = Annotated[int | str | tuple[int, int], AfterValidator(image_size)]
"""Side of a square in pixels, text such as `1024` or `512x768`, or (width, height) in pixels;
kept as (width, height)."""
