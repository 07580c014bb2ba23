"""What planning touches outside itself: trials on the machine, and records of other searches."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autotune import __version__
from autotune.cost.predict import Predictor
from autotune.families.resolve import ResolvedModel
from autotune.knobs.base import Setting
from autotune.schema import Candidate, Choice, HardwareProfile, TrialResult, Workload
from autotune.sharing.query import Survey, survey
from autotune.trials.parity import proven
from autotune.trials.runner import ProcessTrialRunner

Run = Callable[[Candidate], TrialResult]
"""Tries a candidate for a few steps."""


@contextmanager
def child_processes(model: str, cost: Predictor) -> Iterator[Run]:
    """Trials in child processes of this machine."""
    with ProcessTrialRunner.on(cost.hardware, model, cost.workload, predict=cost.predict) as runner:
        yield runner.run


def rehearsal(model: str, cost: Predictor, candidate: Candidate, most_seconds: float) -> TrialResult | None:
    """A longer trial of `candidate` in a child process of this machine, through every phase of a run."""
    started = time.monotonic()
    with ProcessTrialRunner.on(cost.hardware, model, cost.workload, predict=cost.predict) as runner:
        result = runner.confirm(candidate, cost.caching[0], most_seconds)
    return TrialResult.model_validate({**dict(result), "wall_seconds": round(time.monotonic() - started, 3)})


@dataclass(frozen=True)
class Surroundings:
    """Replaced as a whole where trials are replayed, or made up by a test."""

    trials: Callable[[str, Predictor], AbstractContextManager[Run]] = child_processes
    survey: Callable[[HardwareProfile, Workload], Survey] = survey
    autotune_version: str = __version__
    needs_weights: bool = True
    """Whether trials read the model's files, so that they must be whole."""
    prove: Callable[[Setting, Mapping[str, Sequence[Choice]], ResolvedModel], HardwareProfile] = proven
    """Adds to the machine which choices compute right on it."""
    rehearse: Callable[[str, Predictor, Candidate, float], TrialResult | None] = rehearsal
    """Tries a winner for longer; None where that cannot be."""
    tried: tuple[TrialResult, ...] | None = None
    """All that a search tried, in order, where it is over and is not to be repeated."""
