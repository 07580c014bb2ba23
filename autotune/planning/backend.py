"""What planning touches outside itself: trials on the machine, and records of other searches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autotune.cost import Predictor
from autotune.families import ResolvedModel
from autotune.knobs import TuningContext
from autotune.runtime import __version__
from autotune.schema import Candidate, Choice, HardwareProfile, TrialResult, Workload
from autotune.search import TrialFunction
from autotune.sharing import StoreMatches, find_matches
from autotune.trials import ProcessTrialRunner, check_parity


@contextmanager
def child_processes(model: str, cost: Predictor) -> Iterator[TrialFunction]:
    """Trials in child processes of this machine."""
    with ProcessTrialRunner(cost.hardware, model, cost.workload, predict=cost.predict) as runner:
        yield runner.run


def rehearsal(model: str, cost: Predictor, candidate: Candidate, most_seconds: float) -> TrialResult | None:
    """A longer trial of `candidate` in a child process of this machine, through every phase of a run."""
    with ProcessTrialRunner(cost.hardware, model, cost.workload, predict=cost.predict) as runner:
        return runner.confirm(candidate, cost.caching[0], most_seconds)


@dataclass(frozen=True)
class PlannerBackend:
    """The side effects of planning, as functions: a replay or a test passes its own."""

    trials: Callable[[str, Predictor], AbstractContextManager[TrialFunction]] = child_processes
    find_matches: Callable[[HardwareProfile, Workload], StoreMatches] = find_matches
    autotune_version: str = __version__
    needs_weights: bool = True
    """Whether trials read the model's files, so that they must be whole."""
    prove: Callable[[TuningContext, Mapping[str, Sequence[Choice]], ResolvedModel], HardwareProfile] = check_parity
    """Adds to the machine which choices compute right on it."""
    rehearse: Callable[[str, Predictor, Candidate, float], TrialResult | None] = rehearsal
    """Tries a winner for longer; None where that cannot be."""
    tried: tuple[TrialResult, ...] | None = None
    """All that a search tried, in order, where it is over and is not to be repeated."""
