"""The one seam to the machine: a query goes to a source; a raw value comes back, or the reason why
there is none.

Sources: `torch` (the CUDA runtime or MPS as torch sees it), `nvml`, `driver` (CUDA driver API),
`os`, `packages` (installed versions), `environment` (variables). The real ones are in `sources.py`.
"""

from typing import Protocol


class Unavailable(Exception):
    """A source has no value; the message is the reason, for people."""


class System(Protocol):
    """Whatever the facts of a machine are read from."""

    def query(self, source: str, name: str, index: int = 0) -> object:
        """The raw value for device `index` (sources without devices ignore it); the caller
        validates it.

        Raises:
            Unavailable: the source is missing, failed, or does not support the query.
        """
