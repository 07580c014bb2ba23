"""The one narrow seam to the world: a question goes to a source, an answer or a reason comes back.

Sources: `torch` (the CUDA runtime or MPS as torch sees it), `nvml`, `driver` (CUDA driver API), `os`, `packages`
(installed versions), `environment` (variables). `answers.py` is the real one, `FakeSystem` the shipped fake.
"""

from collections.abc import Mapping
from typing import Protocol


class Unanswered(Exception):
    """A source could not answer; the message is the reason, for people."""


class System(Protocol):
    """Whatever can be asked about a machine."""

    def ask(self, source: str, question: str, index: int = 0) -> object:
        """The raw answer about device `index` (sources without devices ignore it). Trust nothing: check it.

        Raises:
            Unanswered: the source is missing, failed, or does not support the question.
        """


class FakeSystem:
    """A machine described by data: `{source: {question: answer}}`.

    Answers under `devices`, a list, belong to one device each. An answer `{"absent": reason}` is unanswered, and a
    whole source may be absent in the same way.
    """

    def __init__(self, answers: Mapping[str, object]) -> None:
        self._answers = answers

    def ask(self, source: str, question: str, index: int = 0) -> object:
        known = _present(self._answers.get(source, {}))
        if not isinstance(known, Mapping):
            raise Unanswered(f"{source} gives no answers")
        devices = known.get("devices", ())
        of_device = devices[index] if index < len(devices) else {}
        for place in (of_device, known):
            if question in place:
                return _present(place[question])
        raise Unanswered("not reported")


def _present(answer: object) -> object:
    if isinstance(answer, Mapping) and "absent" in answer:
        raise Unanswered(str(answer["absent"]))
    return answer
