"""Turns raw values into facts: queries the sources in order, rejects invalid values, records
where each came from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from autotune.machine.system import System, Unavailable
from autotune.plan.hardware import Provenance

T = TypeVar("T")
Facts = Mapping[str, tuple[TypeAdapter[Any], *tuple[str, ...]]]
"""Name of each fact: its type, and where it is read, as `source:query`, the best source first."""

SOURCE_NAMES = {
    "torch": "CUDA runtime",
    "nvml": "NVML",
    "driver": "CUDA driver API",
    "os": "operating system",
    "packages": "installed packages",
    "environment": "environment",
}


def integer(minimum: int, maximum: int) -> TypeAdapter[int]:
    """An integer within [minimum, maximum]."""
    return TypeAdapter(Annotated[int, Field(strict=True, ge=minimum, le=maximum)])


def positive_number(maximum: float) -> TypeAdapter[float]:
    """A finite number above 0 and at most `maximum`."""
    return TypeAdapter(Annotated[float, Field(strict=True, gt=0, le=maximum, allow_inf_nan=False)])


SIZE, FREE = integer(1, 2**50), integer(0, 2**50)
"""Bytes; more than a petabyte is nonsense. What is free may be 0."""
TEXT: TypeAdapter[str] = TypeAdapter(
    Annotated[
        str,
        StringConstraints(strict=True, strip_whitespace=True, pattern=r"^(?: |[^\p{C}\p{Z}])+$"),
    ]
)
"""Printable and not empty."""
FLAG: TypeAdapter[Any] = TypeAdapter(Annotated[StrictBool | Literal[0, 1], AfterValidator(bool)])


class Reader:
    """Reads facts about one device; `provenance` grows with every fact."""

    def __init__(self, system: System, index: int = 0) -> None:
        self.system = system
        self.index = index
        self.provenance: list[Provenance] = []

    def facts(self, owner: str, wanted: Facts) -> dict[str, Any]:
        """The facts of `owner` (`device`, `host` ...) that some source knows, by name."""
        found = {
            name: self.fact(f"{owner}.{name}", kind, *queries)
            for name, (kind, *queries) in wanted.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def fact(self, fact: str, kind: TypeAdapter[T], *queries: str) -> T | None:
        """The first valid value that the `queries` return; None, with every source's reason
        recorded, if none is."""
        reasons = []
        for query in queries:
            source, _, name = query.partition(":")
            raw: object = None
            try:
                raw = self.system.query(source, name, self.index)
                value = kind.validate_python(raw)
            except Unavailable as error:
                reasons.append(f"{SOURCE_NAMES[source]}: {error}")
            except ValidationError:
                reasons.append(f"{SOURCE_NAMES[source]}: reports {raw!r:.60}, which is invalid")
            else:
                self.provenance.append(Provenance(fact=fact, source=SOURCE_NAMES[source]))
                return value
        self.provenance.append(
            Provenance(fact=fact, source=None, absent_because="; ".join(reasons))
        )
        return None

    def raw(self, query: str) -> object:
        """The value without validation or provenance, or None: for what is no fact of the
        profile."""
        source, _, name = query.partition(":")
        try:
            return self.system.query(source, name, self.index)
        except Unavailable:
            return None
