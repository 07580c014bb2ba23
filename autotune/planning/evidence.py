"""What a search stands on besides its own trials: records of this and of similar machines."""

from collections.abc import Sequence

from autotune.schema import TrialResult, Workload
from autotune.search.space import SearchSpace
from autotune.sharing.query import Known, Survey, broken_promise

MOST_RECORDS = 3
"""Records of similar machines that a search stands on."""


def records_to_stand_on(found: Survey, space: SearchSpace) -> tuple[Known, ...]:
    """An exact one alone, else the nearest few; none whose settings cannot be chosen here."""
    usable = [item for item in found.known if item.record.settings in space.candidates]
    exact = [item for item in usable if item.confirmed]
    return tuple(exact[:1] or usable[:MOST_RECORDS])


def trials_of_same_work(stood_on: Sequence[Known], workload: Workload) -> tuple[TrialResult, ...]:
    """Of the nearest record whose largest shape is the same: they correct predictions until a trial has run here."""
    same = (item.trials for item in stood_on if item.record.workload.largest_bucket == workload.largest_bucket)
    return next(same, ())


def confirmed(stood_on: Sequence[Known], results: Sequence[TrialResult]) -> Known | None:
    """The exact record whose promise the first trial here has kept."""
    for item in stood_on:
        kept = results and results[0].candidate == item.record.settings
        if item.confirmed and kept and broken_promise(item.record, results[0]) is None:
            return item
    return None


def confirmed_trials(stood_on: Sequence[Known], results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
    """Trials of a record that has been confirmed explain, too, why others lost."""
    item = confirmed(stood_on, results)
    tried = {result.candidate for result in results}
    return tuple(trial for trial in item.trials if trial.candidate not in tried) if item else ()
