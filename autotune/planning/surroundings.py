"""What planning touches outside itself: trials on the machine, and records of other searches."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autotune import __version__
from autotune.schema import Candidate, HardwareProfile, TrialResult, Workload
from autotune.sharing.query import Survey, survey
from autotune.trials.runner import ProcessTrialRunner

Run = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps."""


@contextmanager
def child_processes(model: str, hardware: HardwareProfile, workload: Workload) -> Iterator[Run]:
    """Trials in child processes of this machine."""
    with ProcessTrialRunner.on(hardware, model, workload) as runner:
        yield runner.run


@dataclass(frozen=True)
class Surroundings:
    """Replaced as a whole where trials are replayed, or made up by a test."""

    trials: Callable[[str, HardwareProfile, Workload], AbstractContextManager[Run]] = child_processes
    survey: Callable[[HardwareProfile, Workload], Survey] = survey
    autotune_version: str = __version__
    needs_weights: bool = True
    """Whether trials read the model's files, so that they must be whole."""
