"""Turns raw answers into facts: asks the sources in order, refuses nonsense, remembers where each fact came from."""

import math
from collections.abc import Callable
from typing import TypeVar

from autotune.hardware.system import System, Unanswered
from autotune.schema import Provenance

T = TypeVar("T")

SOURCE_NAMES = {
    "torch": "CUDA runtime",
    "nvml": "NVML",
    "driver": "CUDA driver API",
    "os": "operating system",
    "packages": "installed packages",
    "environment": "environment",
}

MOST_BYTES = 2**50
"""A petabyte: more memory than that is nonsense."""


class Nonsense(Exception):
    """An answer that cannot be true."""


class Reader:
    """Reads facts about one device; `provenance` grows with every fact read."""

    def __init__(self, system: System, index: int = 0) -> None:
        self.system = system
        self.index = index
        self.provenance: list[Provenance] = []

    def integer(self, fact: str, *questions: str, least: int = 1, most: int = MOST_BYTES) -> int | None:
        """A whole number within [least, most], from the first of `source:question` that gives one."""

        def check(answer: object) -> int:
            if isinstance(answer, bool) or not isinstance(answer, int) or not least <= answer <= most:
                raise Nonsense
            return answer

        return self.fact(fact, questions, check)

    def number(self, fact: str, *questions: str, least: float = 0.0, most: float = 1e6) -> float | None:
        """A finite number above `least` and at most `most`."""

        def check(answer: object) -> float:
            if isinstance(answer, bool) or not isinstance(answer, int | float):
                raise Nonsense
            if not math.isfinite(answer) or not least < answer <= most:
                raise Nonsense
            return float(answer)

        return self.fact(fact, questions, check)

    def text(self, fact: str, *questions: str) -> str | None:
        """Printable text that is not empty."""

        def check(answer: object) -> str:
            if not isinstance(answer, str) or not answer.strip() or not answer.isprintable():
                raise Nonsense
            return answer.strip()

        return self.fact(fact, questions, check)

    def flag(self, fact: str, *questions: str) -> bool | None:
        """True or false, also told as 0 or 1."""

        def check(answer: object) -> bool:
            if answer not in (0, 1) or not isinstance(answer, int):
                raise Nonsense
            return bool(answer)

        return self.fact(fact, questions, check)

    def fact(self, fact: str, questions: tuple[str, ...], check: Callable[[object], T]) -> T | None:
        """The first answer that passes `check` (which raises `Nonsense`), or None with every reason kept."""
        reasons = []
        for question in questions:
            source, _, what = question.partition(":")
            answer: object = None
            try:
                answer = self.system.ask(source, what, self.index)
                value = check(answer)
            except Unanswered as error:
                reasons.append(f"{SOURCE_NAMES[source]}: {error}")
            except Nonsense:
                reasons.append(f"{SOURCE_NAMES[source]}: answered {answer!r:.60}, which cannot be")
            else:
                self.provenance.append(Provenance(fact=fact, source=SOURCE_NAMES[source]))
                return value
        self.provenance.append(Provenance(fact=fact, source=None, absent_because="; ".join(reasons)))
        return None

    def quiet(self, question: str) -> object:
        """The raw answer, or None: for what is no fact of the profile."""
        source, _, what = question.partition(":")
        try:
            return self.system.ask(source, what, self.index)
        except Unanswered:
            return None
