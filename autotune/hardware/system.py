"""The one narrow seam to the world: a question goes to a source, an answer or a reason comes back.

Sources: `torch` (the CUDA runtime or MPS as torch sees it), `nvml`, `driver` (CUDA driver API), `os`, `packages`
(installed versions), `environment` (variables). `answers.py` is the real one.
"""

from typing import Protocol


class Unavailable(Exception):
    """A source could not answer; the message is the reason, for people."""


class System(Protocol):
    """Whatever can be asked about a machine."""

    def ask(self, source: str, question: str, index: int = 0) -> object:
        """The raw answer about device `index` (sources without devices ignore it). Trust nothing: check it.

        Raises:
            Unavailable: the source is missing, failed, or does not support the question.
        """
