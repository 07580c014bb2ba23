"""Turns raw answers into facts: asks the sources in order, refuses nonsense, remembers where each fact came from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, TypeAdapter, ValidationError

from autotune.hardware.system import System, Unavailable
from autotune.schema import Provenance

T = TypeVar("T")
Facts = Mapping[str, tuple[TypeAdapter[Any], *tuple[str, ...]]]
"""Name of each fact to what it can be and where it is asked, as `source:question`, the best source first."""

SOURCE_NAMES = {
    "torch": "CUDA runtime",
    "nvml": "NVML",
    "driver": "CUDA driver API",
    "os": "operating system",
    "packages": "installed packages",
    "environment": "environment",
}


def whole(least: int, most: int) -> TypeAdapter[int]:
    """A whole number within [least, most]."""
    return TypeAdapter(Annotated[int, Field(strict=True, ge=least, le=most)])


def number(most: float) -> TypeAdapter[float]:
    """A finite number above 0 and at most `most`."""
    return TypeAdapter(Annotated[float, Field(strict=True, gt=0, le=most, allow_inf_nan=False)])


SIZE, FREE = whole(1, 2**50), whole(0, 2**50)
"""Bytes; more than a petabyte is nonsense. What is free may be nothing."""
TEXT: TypeAdapter[str] = TypeAdapter(
    Annotated[str, StringConstraints(strict=True, strip_whitespace=True, pattern=r"^(?: |[^\p{C}\p{Z}])+$")]
)
"""Printable and not empty."""
FLAG: TypeAdapter[Any] = TypeAdapter(Annotated[StrictBool | Literal[0, 1], AfterValidator(bool)])


class Reader:
    """Reads facts about one device; `provenance` grows with every fact read."""

    def __init__(self, system: System, index: int = 0) -> None:
        self.system = system
        self.index = index
        self.provenance: list[Provenance] = []

    def facts(self, owner: str, wanted: Facts) -> dict[str, Any]:
        """Those of the facts of `owner` that somebody knows, by name."""
        found = {name: self.fact(f"{owner}.{name}", kind, *asked) for name, (kind, *asked) in wanted.items()}
        return {name: value for name, value in found.items() if value is not None}

    def fact(self, fact: str, kind: TypeAdapter[T], *questions: str) -> T | None:
        """The first answer that can be, or None with every reason kept."""
        reasons = []
        for question in questions:
            source, _, what = question.partition(":")
            answer: object = None
            try:
                answer = self.system.ask(source, what, self.index)
                value = kind.validate_python(answer)
            except Unavailable as error:
                reasons.append(f"{SOURCE_NAMES[source]}: {error}")
            except ValidationError:
                reasons.append(f"{SOURCE_NAMES[source]}: answered {answer!r:.60}, which cannot be")
            else:
                self.provenance.append(Provenance(fact=fact, source=SOURCE_NAMES[source]))
                return value
        self.provenance.append(Provenance(fact=fact, source=None, absent_because="; ".join(reasons)))
        return None

    def raw(self, question: str) -> object:
        """The answer as it came, unchecked, or None: for what is no fact of the profile."""
        source, _, what = question.partition(":")
        try:
            return self.system.ask(source, what, self.index)
        except Unavailable:
            return None
