"""The base of frozen objects: immutable, strict, closed, finite; their digest; amounts in words."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

SCHEMA_VERSION: Final = 2
"""Version of the plans and records that are written, and the only one that is read."""

MAX_DEPTH = 32  # levels of lists and mappings in a document; real ones have fewer than ten

TRIAL_PROTOCOL_VERSION = 1
"""Version of how a trial measures; results of different versions are never compared."""

PositiveInt = Field(ge=1, lt=2**63)
NaturalInt = Field(ge=0, lt=2**63)
"""Nothing counted needs more than 63 bits; the product of two such numbers still fits a float."""


class Frozen(BaseModel):
    """Base of every object that flows: immutable, strict, closed, of finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def changed(self, **changes: object) -> Self:
        """Copy with these values. It is validated, which `model_copy(update=)` does not do."""
        return type(self).model_validate({**dict(self), **changes})


@dataclass(frozen=True)
class Option:
    """The option of a request's field, if it is not `--` and the name."""

    flag: str = ""
    """`--steps` or `--flip/--no-flip`; without dashes it stands for an argument: `PLAN`."""
    short: str = ""
    metavar: str = ""  # name of the value; one with `=` is a name and a value, and may be repeated
    envvar: str = ""
    is_required: bool = False
    is_hidden: bool = False  # true if only Python has it


HIDDEN = Option(is_hidden=True)


LOGGER = logging.getLogger("autotune")
LOGGER.addHandler(logging.NullHandler())  # silent until a program says where its logs go


def log_event(event: Any) -> None:
    """Log what an event tells to the logger `autotune`: the listener where none is named."""
    LOGGER.log(*event.logged)


class Request(Frozen):
    """Base of what a user asks: it knows which of its fields were given."""

    on_event: Annotated[Callable[[Any], None], HIDDEN] = Field(default=log_event, repr=False)
    """Listener to progress: it gets the events of `autotune.events`."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name, in the order of their declaration."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set and name != "on_event"
        }

    def given_of(self, kind: type[Frozen]) -> dict[str, Any]:
        """Return the given fields that `kind` has, too."""
        return {name: value for name, value in self.given.items() if name in kind.model_fields}

    def changed(self, **changes: object) -> Self:
        """Return a validated copy with these values, which count as given, too."""
        return type(self).model_validate({"on_event": self.on_event, **self.given, **changes})


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the dotted keys of the first problem in a document, and what is wrong there."""
    first = error.errors()[0]
    keys = [str(key) for key in first["loc"]]  # those with brackets are a union's members
    return ".".join(key for key in keys if "[" not in key), told(first)


def told(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says is wrong, to continue a sentence."""
    text: str = problem["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def digest_of(value: Frozen | dict[str, object]) -> str:
    """Return the SHA-256 of canonical JSON (sorted keys, no spaces) as `sha256:<64 hex digits>`."""
    data = value.model_dump(mode="json") if isinstance(value, Frozen) else value
    text = json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


MAX_BYTES = 1 << 60
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_bytes(amount: int | str) -> int:
    """Return an amount such as `20GiB` in bytes. Raises ValueError if it is none, or absurd."""
    if isinstance(amount, int):
        if not 0 <= amount < MAX_BYTES:
            raise ValueError(f"{amount} bytes are no amount of memory")
        return amount
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", amount)
    unit = UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{amount!r} is not an amount of memory, such as 20GiB or 900MiB")
    return memory_bytes(int(float(match.group(1)) * unit))


def image_size(size: int | str | tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) in pixels of `1024` or `512x768`; ValueError if it is neither."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, tuple):
        return size
    sides = size.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() for side in sides):
        raise ValueError(f"{size!r} is no resolution, such as 1024 (a square) or 512x768")
    return int(sides[0]), int(sides[-1])


def _hours(time: Any) -> Any:
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
