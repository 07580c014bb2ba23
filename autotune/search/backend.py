"""What planning touches outside itself: trials on the machine, and records of other searches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autotune.cost.predict import CostModel
from autotune.knobs.knob import TuningContext
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.trial import TrialResult
from autotune.plan.workload import Workload
from autotune.search.parity import check_parity
from autotune.search.runner import ProcessTrialRunner
from autotune.search.study import TrialFunction
from autotune.share.warm_start import StoreMatches, find_matches
from autotune.system.version import __version__


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
    run."""
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
