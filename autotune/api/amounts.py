"""Amounts as people write them: memory such as `20GiB`, sizes such as `1024x768`."""

import re

from autotune.cost.estimate import parse_resolution
from autotune.errors import InvalidInput

MemoryAmount = int | str
"""Bytes, or text such as `20GiB`, `900 MiB` or `20GB`."""

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_bytes(amount: MemoryAmount) -> int:
    """The amount in bytes.

    Raises:
        InvalidInput: it is not an amount of memory.
    """
    if isinstance(amount, int):
        return amount
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", amount)
    unit = UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise InvalidInput(
            f"{amount!r} is not an amount of memory", hint="write it like 20GiB or 900MiB"
        )
    return int(float(match.group(1)) * unit)


ImageSize = int | str | tuple[int, int]
"""Side of a square in pixels, text such as `1024` or `512x768`, or (width, height) in pixels."""


def image_size(size: ImageSize) -> tuple[int, int]:
    """(width, height) in pixels.

    Raises:
        InvalidInput: it is not a size.
    """
    if isinstance(size, int):
        return size, size
    return parse_resolution(size) if isinstance(size, str) else size
