"""What planning touches outside itself: trials on the machine, and records of other searches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autotune.cost import CostModel
from autotune.families import ResolvedModel
from autotune.knobs import TuningContext
from autotune.runtime import __version__
from autotune.schema import Candidate, Choice, HardwareProfile, ModelRef, TrialResult, Workload
from autotune.search import TrialFunction
from autotune.sharing import StoreMatches, find_matches
from autotune.trials import ProcessTrialRunner, check_parity


def _trial_runner(model: ModelRef | str, cost: CostModel) -> ProcessTrialRunner:
    return ProcessTrialRunner(
        cost.hardware,
        model,
        cost.workload,
        budget=cost.training_budget,
        resident_bytes=cost.resident_encoder_bytes,
        predict=cost.as_trials_run().predict,
    )


@contextmanager
def run_in_child_processes(model: ModelRef | str, cost: CostModel) -> Iterator[TrialFunction]:
    """Trials in child processes of this machine."""
    with _trial_runner(model, cost) as runner:
        yield runner.run


def rehearse_in_child_process(
    model: ModelRef | str, cost: CostModel, candidate: Candidate, max_seconds: float
) -> TrialResult:
    """A longer trial of `candidate` in a child process of this machine, through every phase of a
    run.
    """
    with _trial_runner(model, cost) as runner:
        return runner.confirm(candidate, cost.caching, max_seconds)


@dataclass(frozen=True)
class PlannerBackend:
    """The side effects of planning, as functions: a test passes its own."""

    trials: Callable[[ModelRef | str, CostModel], AbstractContextManager[TrialFunction]] = (
        run_in_child_processes
    )
    """Starts trials of the model that is named."""
    find_matches: Callable[[HardwareProfile, Workload, int], StoreMatches] = find_matches
    """Looks up records for the machine, the work of one process and the bytes that it may take."""
    autotune_version: str = __version__
    needs_weights: bool = True
    """Whether trials read the model's files, so that they must be complete."""
    check_parity: Callable[
        [TuningContext, Mapping[str, Sequence[Choice]], ResolvedModel], HardwareProfile
    ] = check_parity
    """Adds to the machine's profile which choices compute right on it."""
    rehearse: Callable[[ModelRef | str, CostModel, Candidate, float], TrialResult | None] = (
        rehearse_in_child_process
    )
    """Tries a winner for at most so many seconds of steps; None if that is not possible."""
